-- claim: ready → running, for up to p_limit jobs of the given lanes, in the order given; counts the attempt.
-- Neighbouring lanes of one p_groups number (a priority) share: first each gives up to its share, then the rest is filled
-- from them, before the next group is looked at. Each lane is scanned from its floor, below which nothing is ready
-- (floor.py). An empty lane costs one index probe. Lanes of paused queues are left out.
-- Precondition: the worker lives; its row is locked FOR KEY SHARE first, so that rescue (FOR UPDATE) and a claim never
-- overlap; a dead worker gets SQLSTATE AQ001. Then a shared lock, so that wait_for_claims can wait for those in flight;
-- then live rows in lane order, SKIP LOCKED: no claim waits for another. Where a tenant of one of them is limited, claim_limited
-- goes on, from the beginning: our own locks do not hold it up. It is called at once where there are limits of tasks or keys, whose
-- names stand in the jobs, where several queues share, and by a worker that has met many limits (p_key_floors): it will meet more.
-- Rows are locked lane by lane, and updated in one statement at the end: an empty lane then costs a probe and no more. Where
-- no lane leaves anything to another (one queue), one statement locks them: it comes to the next lane only for what is missing.
-- Of a single job the partition is known before its row is looked for: to begin a look into each costs more than all else.
-- Served by live_pkey. ctid = ANY(ARRAY(…)) because a join with a LIMIT parameter flips to a sequential scan.
-- keys: the limited keys that the job holds, NULL where it is known to hold none. Rows without a job_id: see claim_limited.
-- p_limit 0 is a rehearsal, of any worker: it takes nothing, but runs through all of it, so that the connection has its plans.
CREATE OR REPLACE FUNCTION aioqueue.claim(
    p_worker bigint, p_lanes bigint[], p_floor_vts bigint[], p_floor_ids uuid[], p_groups integer[], p_shares integer[],
    p_limit integer, p_key_floors jsonb DEFAULT '{}'
) RETURNS TABLE (job_id uuid, lane bigint, vt bigint, attempt integer, spared integer, tenant text, task text, queue text,
                 priority smallint, max_attempts integer, payload text, created_at timestamptz, keys bigint[])
LANGUAGE plpgsql VOLATILE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET jit = off SET plan_cache_mode = force_generic_plan
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_sort = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
#variable_conflict use_column
DECLARE
    free integer := p_limit; wanted integer; got integer; first integer := 1; last integer; n integer := cardinality(p_lanes);
    spent boolean[] := array_fill(false, ARRAY[n]); paused bigint[]; chunk tid[]; taken tid[] := '{}';
    from_vts bigint[] := p_floor_vts; from_ids uuid[] := p_floor_ids; seen uuid[] := array_fill(NULL::uuid, ARRAY[n]);
    last_vt bigint; last_id uuid; rehearsed boolean := p_limit = 0; alone boolean := p_limit <= ALL (p_shares); ids uuid[];
    limited boolean; tenants text[];
BEGIN
    PERFORM FROM aioqueue.worker w WHERE w.id = p_worker AND NOT w.dead AND w.lease_until > clock_timestamp() FOR KEY SHARE;
    IF NOT FOUND AND NOT rehearsed THEN
        RAISE EXCEPTION USING ERRCODE = 'AQ001', MESSAGE = 'worker ' || p_worker || ' is dead, unknown, or its lease has ended';
    END IF;
    PERFORM pg_advisory_xact_lock_shared(hashtextextended('aioqueue.settle_limits', 0));
    paused := aioqueue.paused_lanes();
    IF cardinality(paused) > 0 THEN
        spent := ARRAY(SELECT l = ANY (paused) FROM unnest(p_lanes) AS l);
    END IF;
    limited := EXISTS (SELECT FROM aioqueue.limits);
    IF limited AND (NOT alone OR pg_column_size(p_key_floors) >= 500 OR EXISTS (
        SELECT FROM aioqueue.limits l WHERE l.kind = ANY ('{task,key}') AND (l.paused OR l.max_running IS NOT NULL))) THEN
        RETURN QUERY SELECT * FROM aioqueue.claim_limited(
            p_worker, p_lanes, p_floor_vts, p_floor_ids, p_groups, p_shares, p_limit, p_key_floors, spent);
        RETURN;
    END IF;
    IF alone THEN
        SELECT coalesce(array_agg(x.c), '{}'), array_agg(x.job_id), array_agg(x.tenant) INTO taken, ids, tenants FROM (
            SELECT y.c, y.job_id, y.tenant
              FROM ROWS FROM (unnest(p_lanes), unnest(p_floor_vts), unnest(p_floor_ids)) AS u (lane, vt, id),
                   LATERAL (SELECT l.ctid AS c, l.job_id, l.tenant FROM aioqueue.live l
                             WHERE l.lane = u.lane AND (l.vt, l.job_id) >= (u.vt, u.id) AND l.worker IS NULL
                             ORDER BY l.vt, l.job_id LIMIT p_limit FOR UPDATE SKIP LOCKED) y
             WHERE u.lane <> ALL (paused) LIMIT p_limit) x;
        IF limited AND (rehearsed OR EXISTS (SELECT FROM aioqueue.limits l
            WHERE l.kind = 'tenant' AND l.name = ANY (tenants) AND (l.paused OR l.max_running IS NOT NULL))) THEN
            RETURN QUERY SELECT * FROM aioqueue.claim_limited(
                p_worker, p_lanes, p_floor_vts, p_floor_ids, p_groups, p_shares, p_limit, p_key_floors, spent);
            IF NOT rehearsed THEN
                RETURN;
            END IF;
        END IF;
        IF cardinality(ids) = 1 OR rehearsed THEN
            last_id := ids[1];
            RETURN QUERY
            UPDATE aioqueue.live r SET worker = p_worker, attempt = r.attempt + 1, claimed_at = clock_timestamp()
              FROM aioqueue.job j WHERE r.ctid = ANY (taken) AND j.id = last_id
            RETURNING r.job_id, r.lane, r.vt, r.attempt, r.spared, nullif(r.tenant, ''), j.task, j.queue, j.priority,
                      j.max_attempts, j.payload::text, j.created_at, NULL::bigint[];
            IF NOT rehearsed THEN
                RETURN;
            END IF;
        END IF;
    END IF;
    WHILE first <= n AND (free > 0 AND NOT alone OR rehearsed) LOOP
        last := first;
        WHILE last < n AND p_groups[last + 1] = p_groups[first] LOOP
            last := last + 1;
        END LOOP;
        FOR round IN 1..2 LOOP
            FOR i IN first..last LOOP
                EXIT WHEN free <= 0 AND NOT rehearsed;
                CONTINUE WHEN spent[i];
                wanted := CASE WHEN round = 1 AND first < last THEN least(p_shares[i], free) ELSE free END;
                chunk := ARRAY(
                    SELECT l.ctid FROM aioqueue.live l
                     WHERE l.lane = p_lanes[i] AND (l.vt, l.job_id) >= (from_vts[i], from_ids[i]) AND l.worker IS NULL
                       AND l.job_id IS DISTINCT FROM seen[i]
                     ORDER BY l.vt, l.job_id LIMIT wanted FOR UPDATE SKIP LOCKED);
                got := cardinality(chunk);
                spent[i] := got < wanted;
                free := free - got;
                taken := taken || chunk;
                IF round = 1 AND NOT spent[i] AND free > 0 THEN
                    -- Our own lock would not hold up the second round: it goes on behind the last.
                    SELECT l.vt, l.job_id INTO last_vt, last_id FROM aioqueue.live l WHERE l.ctid = chunk[got];
                    from_vts[i] := last_vt; from_ids[i] := last_id; seen[i] := last_id;
                END IF;
            END LOOP;
        END LOOP;
        first := last + 1;
    END LOOP;
    IF cardinality(taken) = 0 AND NOT rehearsed THEN
        RETURN;
    END IF;
    RETURN QUERY
    UPDATE aioqueue.live r SET worker = p_worker, attempt = r.attempt + 1, claimed_at = clock_timestamp()
      FROM aioqueue.job j WHERE r.ctid = ANY (taken) AND j.id = r.job_id
    RETURNING r.job_id, r.lane, r.vt, r.attempt, r.spared, nullif(r.tenant, ''), j.task, j.queue, j.priority,
              j.max_attempts, j.payload::text, j.created_at, NULL::bigint[];
END $$;
