-- lock_keys: the one way to lock limited keys, until the end of the transaction; whoever counts held rows, parks or unparks
-- has them. Keys share 256 locks, so that however many keys there are the server's lock table is not filled.
-- Precondition: the transaction waits for no other lock afterwards. p_wait: all keys of the transaction in one call, locked
-- in one order everywhere, so that no two transactions wait for each other; without it only what is free. Returns the keys
-- that were not locked, '{}' when waiting.
CREATE OR REPLACE FUNCTION aioqueue.lock_keys(p_keys bigint[], p_wait boolean DEFAULT true) RETURNS bigint[]
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    slot bigint; busy bigint[] := '{}';
BEGIN
    FOR slot IN SELECT DISTINCT k & 255 FROM unnest(p_keys) AS k ORDER BY 1 LOOP
        IF p_wait THEN
            PERFORM pg_catalog.pg_advisory_xact_lock(pg_catalog.hashtextextended('aioqueue.limits', slot));
        ELSIF NOT pg_catalog.pg_try_advisory_xact_lock(pg_catalog.hashtextextended('aioqueue.limits', slot)) THEN
            busy := busy || ARRAY(SELECT k FROM unnest(p_keys) AS k WHERE k & 255 = slot);
        END IF;
    END LOOP;
    RETURN busy;
END $$;
