-- beat: a living worker stays alive for another lease, counted by the database's clock. No row: it was declared dead or is
-- unknown, and must cancel its jobs. p_problems is what the worker says of itself, for `health`. One HOT update; a claim's
-- lock on the row (FOR KEY SHARE) does not hinder it.
CREATE OR REPLACE FUNCTION aioqueue.beat(p_worker bigint, p_lease double precision, p_running integer, p_problems text[]) RETURNS boolean
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    UPDATE aioqueue.worker w SET beat_at = clock_timestamp(), running = p_running, problems = p_problems,
           lease_until = clock_timestamp() + make_interval(secs => p_lease)
     WHERE w.id = p_worker AND NOT w.dead;
    RETURN FOUND;
END $$;
