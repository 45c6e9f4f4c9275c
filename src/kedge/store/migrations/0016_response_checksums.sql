-- Why: a response decides which request may follow it, so damage in any of its columns must be found.

ALTER TABLE responses ADD COLUMN checksum {bytes};
