"""What the page and the command line show alike: the response tree of a conversation, its layout, and words."""
