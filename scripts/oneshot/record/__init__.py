"""The record of a run: what it holds, how it is judged, and what is kept out of it."""
