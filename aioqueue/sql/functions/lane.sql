-- lane: the 64-bit name of one line of jobs, a queue and a priority.
-- From md5, which is stable for ever; job.lane() in the client computes the same. Nothing is interned, no row is made.
CREATE OR REPLACE FUNCTION aioqueue.lane(p_queue text, p_priority integer) RETURNS bigint
LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$
    SELECT ('x' || pg_catalog.left(pg_catalog.md5(pg_catalog.convert_to(p_priority::text || ':' || p_queue, 'UTF8')), 16))::bit(64)::bigint
$$;
