"""Bundles: whole and consistent, beside each other, over time, for others."""
