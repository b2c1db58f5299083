-- id_times: how many jobs (p_cap at most) have an id of a time that is more than a minute ahead, for which no range was made: they
-- stand in DEFAULT; how far ahead the last one is, in seconds; how many bytes DEFAULT's three partitions have. Changes nothing.
-- Served by the primary key of job's DEFAULT partition: the bounds leave no other one to read.
WITH bound AS (
    SELECT greatest(
               rpad(lpad(to_hex(((extract(epoch FROM clock_timestamp()) + 60) * 1000)::bigint), 12, '0'), 32, '0')::uuid,
               (SELECT max(substring(pg_catalog.pg_get_expr(c.relpartbound, c.oid) FROM $$TO \('([0-9a-f-]+)'\)$$)::uuid::text)
                  FROM pg_catalog.pg_inherits i JOIN pg_catalog.pg_class c ON c.oid = i.inhrelid
                 WHERE i.inhparent = 'aioqueue.job'::regclass)::uuid
           ) AS id
)
SELECT (SELECT count(*) FROM (SELECT FROM aioqueue.job j WHERE j.id >= (SELECT b.id FROM bound b) LIMIT %(cap)s::integer) x) AS jobs,
       (SELECT ('x' || left(replace(j.id::text, '-', ''), 12))::bit(48)::bigint / 1000.0 - extract(epoch FROM clock_timestamp())
          FROM aioqueue.job j WHERE j.id >= (SELECT b.id FROM bound b) ORDER BY j.id DESC LIMIT 1)::double precision AS ahead,
       (SELECT sum(pg_catalog.pg_total_relation_size(c.oid))::bigint
          FROM pg_catalog.pg_namespace n JOIN pg_catalog.pg_class c ON c.relnamespace = n.oid
         WHERE n.nspname = %(schema)s::name AND c.relname IN ('job_default', 'outcome_default', 'attempt_default')) AS bytes
