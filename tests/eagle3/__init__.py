# SPDX-License-Identifier: Apache-2.0
"""EAGLE-3 on a small random target: transformers' Llama, saved as a folder, and random heads beside it."""
