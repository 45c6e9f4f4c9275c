"""Access to databases that the store and the server share: connections, transactions and their errors."""
