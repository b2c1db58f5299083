-- first_id: the lowest UUIDv7 of a moment, as a bound between ranges of id time.
CREATE OR REPLACE FUNCTION aioqueue.first_id(p_at timestamptz) RETURNS uuid
LANGUAGE sql IMMUTABLE AS $$
    SELECT pg_catalog.rpad(pg_catalog.lpad(pg_catalog.to_hex((pg_catalog.date_part('epoch', p_at) * 1000)::bigint), 12, '0'), 32, '0')::uuid
$$;
