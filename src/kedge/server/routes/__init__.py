"""The endpoints of the server, one module per resource."""
