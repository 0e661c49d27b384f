# SPDX-License-Identifier: Apache-2.0
"""How ranks of a group reach each other, through torch.distributed or shared memory."""
