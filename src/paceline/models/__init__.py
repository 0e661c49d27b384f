# SPDX-License-Identifier: Apache-2.0
"""Model architectures in torch, and what reads their weights and tokenizers from files."""
