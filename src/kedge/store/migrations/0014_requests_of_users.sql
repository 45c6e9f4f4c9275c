-- Why: each user has the newest requests that went through a proxy, however many others send. They are counted, listed
-- and deleted by namespace, without reading their bodies.

CREATE INDEX proxied_requests_by_namespace ON proxied_requests (namespace, id);
