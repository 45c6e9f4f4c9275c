-- Why: to compare what was expected of a provider's prompt cache with what it counted, and to sum what it saved.

ALTER TABLE responses ADD COLUMN predicted_cached_tokens {integer};
ALTER TABLE responses ADD COLUMN cache_write_tokens {integer};
ALTER TABLE responses ADD COLUMN cache_savings {real};
