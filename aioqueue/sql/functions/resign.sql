-- resign: a worker that stops says so: it is dead, claims nothing more, and the next pass of rescue takes what it left.
CREATE OR REPLACE FUNCTION aioqueue.resign(p_worker bigint) RETURNS void
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    UPDATE aioqueue.worker w SET dead = true, lease_until = least(w.lease_until, clock_timestamp()) WHERE w.id = p_worker;
END $$;
