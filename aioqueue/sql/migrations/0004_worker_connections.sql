-- serves: 4
-- What a worker needs of the server's connections, and the role it connects as, for the doctor's sum (checks/connections.sql).
-- NULL: written by a worker that does not say it.
ALTER TABLE aioqueue.worker ADD COLUMN connections integer, ADD COLUMN role text;
DROP FUNCTION IF EXISTS aioqueue.register_worker(bigint, text, integer, text, text[], integer, double precision, jsonb);
