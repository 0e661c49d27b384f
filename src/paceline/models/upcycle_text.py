# SPDX-License-Identifier: Apache-2.0
"""Texts of several kinds, on which the routers of an upcycled model are centred."""

TEXTS = (
    "The harbour lay still when the first boats came in. Gulls followed them, screaming over the nets, and on the quay"
    " women with baskets were waiting to see what the night had brought. Old Marten counted the sails twice, as he did"
    " every morning; one was missing. He said nothing, lit his pipe and looked out past the mole, where the fog still"
    " hung. By noon half the village stood beside him.",
    "Question: A train leaves at 9:40 and arrives at 13:05. How long is the journey?\n"
    "Answer: From 9:40 to 13:00 are 3 hours and 20 minutes. With the 5 minutes after 13:00 the journey takes 3 hours"
    " and 25 minutes, that is 205 minutes.\n\n"
    "Question: What is 12% of 250?\nAnswer: 0.12 x 250 = 30.",
    "def moving_average(values, width):\n"
    '    """Mean of each window of `width` neighbours."""\n'
    "    if width < 1:\n"
    '        raise ValueError("width must be positive")\n'
    "    total = sum(values[:width])\n"
    "    means = [total / width]\n"
    "    for i in range(width, len(values)):\n"
    "        total += values[i] - values[i - width]\n"
    "        means.append(total / width)\n"
    "    return means\n\n\n"
    'if __name__ == "__main__":\n'
    "    print(moving_average([3, 1, 4, 1, 5, 9, 2, 6], 3))\n",
    "Water boils at a lower temperature on a mountain, because the air above it is thinner and presses less on its"
    " surface. At sea level it takes 100 degrees Celsius; at 3000 metres about 90 are enough. Food that is cooked in"
    " such water needs more time, which is why climbers carry pressure cookers or food that needs no cooking at all.",
    "Dear Ms. Okafor,\n\nthank you for your letter of 14 March. We are sorry to hear that the second parcel did not"
    " arrive. According to our records it was handed to the carrier on 9 March (number 7730-2281); we have asked for an"
    " inquiry and will send you a replacement today, free of charge. Please keep the first parcel as it is.\n\n"
    "Kind regards,\nJ. Lindqvist, customer service",
    '{"city": "Porto", "population": 231800, "river": "Douro", "bridges": ["Dom Luis I", "Arrabida", "Infante"],'
    ' "coordinates": {"lat": 41.1496, "lon": -8.611}, "capital": false}\n'
    "SELECT name, COUNT(*) AS orders FROM customers JOIN orders USING (customer_id) WHERE year = 2021 GROUP BY name;\n",
    "Die Bibliothek öffnet um neun. Wer ein Buch sucht, findet es im Katalog; wer keines sucht, findet manchmal ein"
    " besseres. Le matin, le marché sent le pain chaud et les oranges. La lluvia empezó antes de que pudiéramos cerrar"
    " las ventanas.",
    "1. Preheat the oven to 180 degrees.\n2. Mix 200 g of flour, 100 g of sugar and a pinch of salt.\n3. Rub in 120 g"
    " of cold butter until the mixture looks like crumbs.\n4. Spread it over the sliced apples and bake for 35"
    " minutes.\n- Serves four.\n- Keeps for two days in a cool place.",
    '"You knew," she said. "You knew all along, and you let me walk in there."\n"I thought you knew, too." He turned'
    ' his hat in his hands. "Everybody did."\n"Everybody!" She laughed, but not because it was funny. "Then tell me one'
    ' thing. Who closed the door?"',
    "In computer science, a queue is a collection whose items are kept in order and leave it in the order in which"
    " they came. Adding an item is called enqueue, removing the oldest one dequeue; both take constant time in a linked"
    " list or a ring buffer. Queues appear wherever a producer and a consumer do not run at the same speed: printers,"
    " network routers, schedulers of operating systems.",
    "Breaking: the council voted 7 to 4 last night to keep the old tram line open until at least 2030. Supporters"
    " had collected more than 18,000 signatures. The mayor, who had favoured buses, called the decision expensive but"
    " understandable. Repairs of the track between Mill Street and the hospital begin in May.",
)
