"""The web page and the JSON API: conversations, their responses on the server, and the plan of each request."""
