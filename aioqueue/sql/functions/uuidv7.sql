-- uuidv7: a job id for clients that bring none (RFC 9562): milliseconds, then random bits. PostgreSQL 18 has its own; 15-17 do not.
-- gen_random_uuid() brings the variant and the random bits; its first 6 bytes and its version are replaced.
CREATE OR REPLACE FUNCTION aioqueue.uuidv7() RETURNS uuid
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    random bytea := pg_catalog.uuid_send(pg_catalog.gen_random_uuid());
    millis bytea := pg_catalog.int8send((extract(epoch FROM pg_catalog.clock_timestamp()) * 1000)::bigint);
BEGIN
    random := pg_catalog.set_byte(random, 6, pg_catalog.get_byte(random, 6) & 15 | 112);
    RETURN pg_catalog.encode(pg_catalog.substr(millis, 3) || pg_catalog.substr(random, 7), 'hex')::uuid;
END $$;
