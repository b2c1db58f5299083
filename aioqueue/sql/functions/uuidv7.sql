-- uuidv7: a job id for clients that bring none (RFC 9562): milliseconds, then random bits. PostgreSQL 18 has its own; 15-17 do not.
CREATE OR REPLACE FUNCTION aioqueue.uuidv7() RETURNS uuid
LANGUAGE sql VOLATILE AS $$
    SELECT pg_catalog.encode(pg_catalog.set_byte(pg_catalog.overlay(pg_catalog.uuid_send(pg_catalog.gen_random_uuid())
               PLACING pg_catalog.substring(pg_catalog.int8send((extract(epoch FROM pg_catalog.clock_timestamp()) * 1000)::bigint) FROM 3)
               FROM 1 FOR 6),
           6, (pg_catalog.get_byte(pg_catalog.uuid_send(pg_catalog.gen_random_uuid()), 6) & 15) | 112), 'hex')::uuid
$$;
