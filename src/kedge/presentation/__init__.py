"""What the page and the command line show alike: the graph of a conversation's responses, its picture, and words."""
