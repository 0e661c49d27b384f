# SPDX-License-Identifier: Apache-2.0
"""Executors in torch: they compute what a step plan says, and decide nothing."""
