-- prune_range: drops the oldest range of id time whose jobs all ended longer than p_succeeded seconds ago; returns the number
-- of jobs dropped, NULL when no range is due (or another process is at it). In one transaction, which changes nothing else.
-- What must stay is put back and falls into DEFAULT: unfinished jobs, and dead and cancelled ones younger than p_unsuccessful.
-- More than 5,000 of these would be locked for too long: such a range is looked at again a day later, when as many more may
-- be put back (so that none stays for ever); and one with a success that is too young, when that is old enough.
-- Begins with a look whether the lock that open transactions withhold is to be had at all, before anything is read.
-- First no row may enter the old range (SHARE on its part of job; ids of today go elsewhere), so that what is found
-- unfinished then is all there can be; what ends meanwhile is kept with its end. Only then the parents are locked,
-- the longest-held first, waiting 40, 20 and 20 ms (SQLSTATE 55P03: try again), so that no claim queues behind us for longer.
CREATE OR REPLACE FUNCTION aioqueue.prune_range(p_succeeded double precision, p_unsuccessful double precision) RETURNS bigint
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET jit = off AS $$
DECLARE
    r aioqueue.id_range; from_id uuid; to_id uuid; newest timestamptz; kept uuid[]; part text; jobs bigint; most integer; unfinished integer;
    at timestamptz := clock_timestamp();
BEGIN
    IF NOT pg_try_advisory_xact_lock(hashtextextended('aioqueue.ranges', 0)) THEN
        RETURN NULL;
    END IF;
    SELECT x.* INTO r FROM aioqueue.id_range x
     WHERE x.ends_at < at - make_interval(secs => p_succeeded) AND (x.look_at IS NULL OR x.look_at <= at)
     ORDER BY x.starts_at LIMIT 1;
    IF NOT FOUND THEN
        RETURN NULL;
    END IF;
    PERFORM set_config('lock_timeout', '40ms', true);
    BEGIN
        LOCK TABLE ONLY aioqueue.job IN ACCESS EXCLUSIVE MODE;
        RAISE SQLSTATE 'AQ000';
    EXCEPTION WHEN SQLSTATE 'AQ000' THEN
        NULL;  -- it is; the lock is gone with this block
    END;
    most := 5000 * (1 + floor((extract(epoch FROM at - r.ends_at) - p_succeeded) / 86400)::integer);
    from_id := aioqueue.first_id(r.starts_at);
    to_id := aioqueue.first_id(r.ends_at);
    EXECUTE format('LOCK TABLE aioqueue.%I IN SHARE MODE', 'job' || r.suffix);
    kept := ARRAY(SELECT l.job_id FROM aioqueue.live l WHERE l.job_id >= from_id AND l.job_id < to_id
                  UNION ALL SELECT s.job_id FROM aioqueue.scheduled s WHERE s.job_id >= from_id AND s.job_id < to_id
                  UNION ALL SELECT p.job_id FROM aioqueue.parked p WHERE p.job_id >= from_id AND p.job_id < to_id);
    unfinished := cardinality(kept);
    EXECUTE format('SELECT max(o.finished_at) FILTER (WHERE o.state = ''succeeded''), count(*) FROM aioqueue.%I o WHERE o.job_id <> ALL ($1)',
                   'outcome' || r.suffix) INTO newest, jobs USING kept;
    EXECUTE format('SELECT $1 || ARRAY(SELECT o.job_id FROM aioqueue.%I o WHERE o.state <> ''succeeded'' AND o.finished_at > $2 LIMIT $3 + 1)',
                   'outcome' || r.suffix) INTO kept USING kept, at - make_interval(secs => p_unsuccessful), most;
    IF newest > at - make_interval(secs => p_succeeded) OR cardinality(kept) > most THEN
        UPDATE aioqueue.id_range x SET look_at = CASE WHEN cardinality(kept) > most THEN at + interval '1 day'
               ELSE newest + make_interval(secs => p_succeeded) END WHERE x.starts_at = r.starts_at;
        RETURN 0;
    END IF;
    LOCK TABLE ONLY aioqueue.job IN ACCESS EXCLUSIVE MODE;
    PERFORM set_config('lock_timeout', '20ms', true);
    LOCK TABLE ONLY aioqueue.outcome IN ACCESS EXCLUSIVE MODE;
    LOCK TABLE ONLY aioqueue.attempt IN ACCESS EXCLUSIVE MODE;
    FOREACH part IN ARRAY ARRAY['job', 'outcome', 'attempt'] LOOP
        EXECUTE format('ALTER TABLE aioqueue.%I DETACH PARTITION aioqueue.%I', part, part || r.suffix);
        EXECUTE format('INSERT INTO aioqueue.%I SELECT * FROM aioqueue.%I x WHERE x.%I = ANY ($1)',
                       part, part || r.suffix, CASE part WHEN 'job' THEN 'id' ELSE 'job_id' END) USING kept;
        EXECUTE format('DROP TABLE aioqueue.%I', part || r.suffix);
    END LOOP;
    DELETE FROM aioqueue.id_range x WHERE x.starts_at = r.starts_at;
    RETURN jobs - (cardinality(kept) - unfinished);
END $$;
