-- Why: the size of a request includes tool definitions and settings, which the sums over blocks leave out; and a
-- deletion that can be undone for some time must survive a restart of the server.

ALTER TABLE responses ADD COLUMN request_bytes {integer};

ALTER TABLE conversations ADD COLUMN delete_at {real};
