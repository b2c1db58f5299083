-- make_ranges: partitions of job, outcome and attempt for the present range of id time and p_ahead more, p_width each; of
-- those that are missing the first p_most, in one transaction. Returns the number made. One process at a time (a try-lock; 0 when another is at it). What stands in DEFAULT for a range
-- (ids of a wrong clock) moves into it; a range for which more than 10,000 rows stand there is left out.
-- LIKE, then ATTACH: a CREATE … PARTITION OF would wait for every transaction that has enqueued. A range that is still to
-- come locks DEFAULT for a moment. The present one, and one whose rows move, lock the parents too: who planned with the
-- partitions of before would look for a row, or put one, where it no longer belongs (a claim would lose the job).
-- Every ATTACH reads all of DEFAULT with its lock in hand; where that is more than p_scan bytes (NULL: whatever it takes)
-- nothing is made, what comes goes to DEFAULT, and is deleted row by row.
-- Waits 40, 20, 20 ms for its locks at most, so that no claim queues behind us for longer; a range for which they are not to
-- be had is left for the next call (SQLSTATE 55P03 when that leaves nothing made).
CREATE OR REPLACE FUNCTION aioqueue.make_ranges(
    p_width double precision, p_ahead integer, p_most integer DEFAULT 100, p_scan bigint DEFAULT 67108864
) RETURNS integer
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET jit = off AS $$
DECLARE
    width double precision := floor(p_width); first double precision; made integer := 0; standing bigint; busy boolean := false;
    lower timestamptz; upper timestamptz; from_id uuid; to_id uuid; suffix text; key text; part text;
BEGIN
    IF width IS NULL OR width < 1 OR p_ahead NOT BETWEEN 0 AND 100 THEN
        RAISE invalid_parameter_value USING MESSAGE = 'make_ranges: expected a width of at least a second and 0 to 100 ahead';
    END IF;
    IF NOT pg_try_advisory_xact_lock(hashtextextended('aioqueue.ranges', 0)) THEN
        RETURN 0;
    END IF;
    IF p_scan < (SELECT sum(pg_relation_size(x)) FROM unnest(ARRAY[
            'aioqueue.job_default', 'aioqueue.outcome_default', 'aioqueue.attempt_default']::regclass[]) AS x) THEN
        RETURN 0;
    END IF;
    first := floor(extract(epoch FROM clock_timestamp()) / width) * width;
    FOR n IN 0..p_ahead LOOP
        lower := to_timestamp(first + n * width);
        upper := to_timestamp(first + (n + 1) * width);
        EXIT WHEN made >= p_most;
        -- Ranges of another width may reach into this one.
        SELECT greatest(lower, max(r.ends_at)) INTO lower FROM aioqueue.id_range r WHERE r.starts_at < upper AND r.ends_at > lower;
        CONTINUE WHEN lower >= upper;
        from_id := aioqueue.first_id(lower);
        to_id := aioqueue.first_id(upper);
        suffix := to_char(lower AT TIME ZONE 'UTC', '"_"YYYYMMDD"t"HH24MISS');
        BEGIN
            PERFORM set_config('lock_timeout', '40ms', true);
            IF n = 0 OR EXISTS (SELECT FROM aioqueue.job_default j WHERE j.id >= from_id AND j.id < to_id) THEN
                LOCK TABLE ONLY aioqueue.job IN ACCESS EXCLUSIVE MODE;
                PERFORM set_config('lock_timeout', '20ms', true);
                LOCK TABLE ONLY aioqueue.outcome IN ACCESS EXCLUSIVE MODE;
                LOCK TABLE ONLY aioqueue.attempt IN ACCESS EXCLUSIVE MODE;
            END IF;
            LOCK TABLE aioqueue.job_default, aioqueue.outcome_default, aioqueue.attempt_default IN ACCESS EXCLUSIVE MODE;
            SELECT count(*) INTO standing FROM (
                SELECT FROM aioqueue.job_default j WHERE j.id >= from_id AND j.id < to_id LIMIT 10001) x;
            IF standing <= 10000 THEN
                FOREACH part IN ARRAY ARRAY['job', 'outcome', 'attempt'] LOOP
                    key := CASE part WHEN 'job' THEN 'id' ELSE 'job_id' END;
                    EXECUTE format('CREATE TABLE aioqueue.%I (LIKE aioqueue.%I INCLUDING ALL)', part || suffix, part);
                    EXECUTE format('WITH d AS (DELETE FROM aioqueue.%I x WHERE x.%I >= $1 AND x.%I < $2 RETURNING x.*) '
                                   'INSERT INTO aioqueue.%I SELECT * FROM d', part || '_default', key, key, part || suffix) USING from_id, to_id;
                    EXECUTE format('ALTER TABLE aioqueue.%I ATTACH PARTITION aioqueue.%I FOR VALUES FROM (%L) TO (%L)',
                                   part, part || suffix, from_id, to_id);
                END LOOP;
                INSERT INTO aioqueue.id_range (starts_at, ends_at, suffix) VALUES (lower, upper, suffix);
                made := made + 1;
            END IF;
        EXCEPTION WHEN lock_not_available THEN
            busy := true;
        END;
    END LOOP;
    IF busy AND made = 0 THEN
        RAISE lock_not_available USING MESSAGE = 'make_ranges: a transaction that has enqueued is open; try again later';
    END IF;
    RETURN made;
END $$;
