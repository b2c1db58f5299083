-- wait_for_claims: returns once every claim has ended that may not have seen the limits and pauses that are committed now; claims
-- that begin afterwards see them. Returns the limits that are not settled yet, {key: version}, for settle_limits, or NULL.
-- In a transaction of its own, which does nothing else: new claims wait for its exclusive lock. p_always false: does not wait
-- when no limit is new.
CREATE OR REPLACE FUNCTION aioqueue.wait_for_claims(p_always boolean) RETURNS jsonb
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF NOT p_always AND NOT EXISTS (SELECT FROM aioqueue.limits r WHERE NOT r.settled) THEN
        RETURN NULL;
    END IF;
    PERFORM pg_advisory_xact_lock(hashtextextended('aioqueue.settle_limits', 0));
    RETURN (SELECT jsonb_object_agg(r.key, r.xmin::text) FROM aioqueue.limits r WHERE NOT r.settled);
END $$;
