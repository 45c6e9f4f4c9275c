-- Why: the settings of a request (temperature, reasoning, …) belong to its response, and conversations can have a
-- time to live.

ALTER TABLE responses ADD COLUMN settings TEXT;

ALTER TABLE conversations ADD COLUMN ttl {real};
