"""The run itself: its stages as data, and the processes that carry them out."""
