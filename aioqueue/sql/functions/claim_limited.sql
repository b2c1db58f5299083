-- claim_limited: the claim where there are limits: ready → running for jobs that fit all their limits, ready → parked for the
-- others, whose attempt is not counted. Called by claim, which has locked the worker's row; p_spent are lanes to leave out.
-- Rows are selected FOR UPDATE SKIP LOCKED in the claim's order; then the keys of all of them are locked in one call, the last
-- thing that is waited for; then held rows are counted in a NEW statement, from the caller's floors. Each job in order gets
-- all of its keys or none, in which case it is parked under the first that is full. Repeated until the claim is filled or the
-- lanes are empty, but no more than about 1,000 are parked; keys that come up in a repetition are locked if they are free,
-- otherwise their jobs stay where they are.
-- Served by live_pkey, job_pkey, limits_kind_name_key, held_pkey.
-- Besides jobs, rows without a job_id: (lane, vt, attempt, spared) for a lane: attempt were parked, up to position vt, and
-- spared = 1 says that there is more; (keys, attempt) without a lane: keys[1] has no held row before position keys[2] (NULL:
-- unknown), and
-- attempt jobs would have had room in it but were parked under others: as many are to be unparked instead.
CREATE OR REPLACE FUNCTION aioqueue.claim_limited(
    p_worker bigint, p_lanes bigint[], p_floor_vts bigint[], p_floor_ids uuid[], p_groups integer[], p_shares integer[],
    p_limit integer, p_key_floors jsonb, p_spent boolean[]
) RETURNS TABLE (job_id uuid, lane bigint, vt bigint, attempt integer, spared integer, tenant text, task text, queue text,
                 priority smallint, max_attempts integer, payload text, created_at timestamptz, keys bigint[])
LANGUAGE plpgsql VOLATILE
AS $$
#variable_conflict use_column
DECLARE
    n integer := cardinality(p_lanes); free integer := p_limit; parked integer := 0; more boolean := false; pass integer := 0;
    size integer; wanted integer; first integer; last integer; number integer; q integer; next_q integer; full_at integer;
    spent boolean[] := p_spent; given integer[] := array_fill(0, ARRAY[n]); parked_in integer[] := array_fill(0, ARRAY[n]);
    parked_to bigint[] := array_fill(0, ARRAY[n]); from_vts bigint[] := p_floor_vts; from_ids uuid[] := p_floor_ids; seen uuid[] := array_fill(NULL::uuid, ARRAY[n]);
    x_rows tid[]; x_ids uuid[]; x_vts bigint[]; x_tenants text[]; x_attempts integer[]; x_spared integer[];
    -- The candidates of one pass, in order, and of which lane (its number) each is.
    c_rows tid[]; c_ids uuid[]; c_vts bigint[]; c_tenants text[]; c_attempts integer[]; c_spared integer[]; c_lanes integer[];
    -- Their limited keys: candidate, key, the limit's own key, its maximum, where the key stands in k_keys.
    f_jobs integer[]; f_keys bigint[]; f_rules bigint[]; f_most integer[]; f_at integer[];
    k_keys bigint[]; k_room integer[]; k_first bigint[]; k_passed integer[]; busy bigint[];
    take_rows tid[]; held_keys bigint[]; held_ids uuid[]; park_rows tid[]; park_at integer[]; park_keys bigint[]; park_rules bigint[];
BEGIN
    LOOP
        pass := pass + 1;
        size := greatest(free, least(parked, 250));
        number := 0; c_rows := '{}'; c_ids := '{}'; c_vts := '{}'; c_tenants := '{}'; c_attempts := '{}'; c_spared := '{}'; c_lanes := '{}';
        first := 1;
        WHILE first <= n AND number < size LOOP
            last := first;
            WHILE last < n AND p_groups[last + 1] = p_groups[first] LOOP
                last := last + 1;
            END LOOP;
            FOR round IN 1..2 LOOP
                FOR i IN first..last LOOP
                    wanted := CASE WHEN round = 1 THEN least(p_shares[i] - given[i], size - number) ELSE size - number END;
                    CONTINUE WHEN spent[i] OR wanted <= 0;
                    SELECT array_agg(x.ctid), array_agg(x.job_id), array_agg(x.vt), array_agg(x.tenant), array_agg(x.attempt), array_agg(x.spared)
                      INTO x_rows, x_ids, x_vts, x_tenants, x_attempts, x_spared
                      FROM (SELECT l.ctid, l.job_id, l.vt, l.tenant, l.attempt, l.spared FROM aioqueue.live l
                             WHERE l.lane = p_lanes[i] AND (l.vt, l.job_id) >= (from_vts[i], from_ids[i]) AND l.worker IS NULL
                               AND l.job_id IS DISTINCT FROM seen[i]
                             ORDER BY l.vt, l.job_id LIMIT wanted FOR UPDATE SKIP LOCKED) x;
                    q := coalesce(cardinality(x_rows), 0);
                    spent[i] := q < wanted;
                    CONTINUE WHEN q = 0;
                    from_vts[i] := x_vts[q]; from_ids[i] := x_ids[q]; seen[i] := x_ids[q];
                    c_rows := c_rows || x_rows; c_ids := c_ids || x_ids; c_vts := c_vts || x_vts; c_tenants := c_tenants || x_tenants;
                    c_attempts := c_attempts || x_attempts; c_spared := c_spared || x_spared; c_lanes := c_lanes || array_fill(i, ARRAY[q]);
                    number := number + q;
                END LOOP;
            END LOOP;
            first := last + 1;
        END LOOP;
        EXIT WHEN number = 0;

        SELECT array_agg(f.i), array_agg(f.key), array_agg(f.rule), array_agg(f.most) INTO f_jobs, f_keys, f_rules, f_most
          FROM (SELECT u.i, CASE WHEN k.kind = 'key' THEN aioqueue.limit_key('key', j.task, j.key) ELSE r.key END AS key, r.key AS rule,
                       CASE WHEN r.paused THEN 0 ELSE r.max_running END AS most
                  FROM unnest(c_ids, c_tenants) WITH ORDINALITY AS u (id, tenant, i),
                       LATERAL (SELECT b.task, b.key FROM aioqueue.job b WHERE b.id = u.id LIMIT 1) j,
                       LATERAL (VALUES ('key', j.task), ('task', j.task), ('tenant', u.tenant)) AS k (kind, name),
                       LATERAL (SELECT l.key, l.paused, l.max_running FROM aioqueue.limits l 
                            WHERE l.kind = k.kind AND l.name = k.name AND (l.paused OR l.max_running IS NOT NULL) LIMIT 1) r
                 WHERE k.kind <> 'key' OR j.key IS NOT NULL) f;
        f_jobs := coalesce(f_jobs, '{}'); f_keys := coalesce(f_keys, '{}');
        busy := aioqueue.lock_keys(f_keys, pass = 1);
        SELECT coalesce(array_agg(k.key), '{}'), array_agg(CASE WHEN k.key = ANY (busy) THEN NULL ELSE k.most - h.number END),
               array_agg(CASE WHEN k.key = ANY (busy) OR k.most = 0 THEN NULL
                              ELSE coalesce(h.first, pg_sequence_last_value('aioqueue.pos'::regclass) + 1) END)
          INTO k_keys, k_room, k_first
          FROM (SELECT DISTINCT u.key, u.most FROM unnest(f_keys, f_most) AS u (key, most)) k,
               LATERAL (SELECT count(*)::integer AS number, min(y.pos) AS first FROM (
                   SELECT h.pos FROM aioqueue.held h WHERE h.key = k.key AND h.pos >= coalesce((p_key_floors ->> k.key::text)::bigint, 0)
                    ORDER BY h.pos LIMIT k.most) y) h;
        f_at := ARRAY(SELECT array_position(k_keys, u) FROM unnest(f_keys) AS u);
        k_passed := array_fill(0, ARRAY[cardinality(k_keys)]);

        take_rows := '{}'; held_keys := '{}'; held_ids := '{}'; park_rows := '{}'; park_at := '{}'; park_keys := '{}'; park_rules := '{}';
        q := 1;
        FOR c IN 1..number LOOP
            EXIT WHEN free = 0;
            next_q := q; full_at := NULL;
            WHILE f_jobs[next_q] = c LOOP
                IF full_at IS NULL AND coalesce(k_room[f_at[next_q]], 0) <= 0 THEN
                    full_at := next_q;
                END IF;
                next_q := next_q + 1;
            END LOOP;
            IF full_at IS NULL THEN
                take_rows := take_rows || c_rows[c];
                free := free - 1; given[c_lanes[c]] := given[c_lanes[c]] + 1;
                FOR y IN q..next_q - 1 LOOP
                    k_room[f_at[y]] := k_room[f_at[y]] - 1;
                    held_keys := held_keys || f_keys[y]; held_ids := held_ids || c_ids[c];
                END LOOP;
            ELSIF k_room[f_at[full_at]] IS NULL THEN
                more := true;
            ELSE
                park_rows := park_rows || c_rows[c]; park_at := park_at || c;
                park_keys := park_keys || f_keys[full_at]; park_rules := park_rules || f_rules[full_at];
                parked := parked + 1; parked_in[c_lanes[c]] := parked_in[c_lanes[c]] + 1;
                parked_to[c_lanes[c]] := greatest(parked_to[c_lanes[c]], c_vts[c]);
                FOR y IN q..next_q - 1 LOOP
                    IF k_room[f_at[y]] > 0 THEN
                        k_passed[f_at[y]] := k_passed[f_at[y]] + 1;
                    END IF;
                END LOOP;
            END IF;
            q := next_q;
        END LOOP;

        IF cardinality(held_keys) > 0 THEN
            INSERT INTO aioqueue.held (key, pos, job_id, worker)
            SELECT u.key, nextval('aioqueue.pos'::regclass), u.id, p_worker FROM unnest(held_keys, held_ids) AS u (key, id);
        END IF;
        RETURN QUERY
        WITH c AS (
            UPDATE aioqueue.live r SET worker = p_worker, attempt = r.attempt + 1, claimed_at = clock_timestamp() WHERE r.ctid = ANY (take_rows)
            RETURNING r.job_id, r.lane, r.vt, r.attempt, r.spared, r.tenant)
        SELECT c.job_id, c.lane, c.vt, c.attempt, c.spared, nullif(c.tenant, ''), j.task, j.queue, j.priority,
               j.max_attempts, j.payload::text, j.created_at, ARRAY(SELECT u.key FROM unnest(held_keys, held_ids) AS u (key, id) WHERE u.id = c.job_id)
          FROM c, LATERAL (SELECT * FROM aioqueue.job b WHERE b.id = c.job_id LIMIT 1) j;
        IF cardinality(park_rows) > 0 THEN
            DELETE FROM aioqueue.live r WHERE r.ctid = ANY (park_rows);
            INSERT INTO aioqueue.parked (key, pos, job_id, rule, lane, tenant, attempt, spared)
            SELECT u.key, nextval('aioqueue.pos'::regclass), c_ids[u.c], u.rule, p_lanes[c_lanes[u.c]], c_tenants[u.c], c_attempts[u.c], c_spared[u.c]
              FROM unnest(park_at, park_keys, park_rules) AS u (c, key, rule);
        END IF;
        RETURN QUERY SELECT NULL::uuid, NULL::bigint, NULL::bigint, u.passed, NULL::integer, NULL, NULL, NULL, NULL::smallint, NULL::integer, NULL,
                            NULL::timestamptz, ARRAY[u.key, u.first]
                       FROM unnest(k_keys, k_first, k_passed) AS u (key, first, passed) WHERE u.first IS NOT NULL OR u.passed > 0;
        more := more OR parked >= 1000;
        EXIT WHEN free = 0 OR parked >= 1000;
    END LOOP;
    IF parked > 0 OR more THEN
        RETURN QUERY SELECT NULL::uuid, u.lane, u.vt, u.parked, (more AND free > 0)::integer, NULL, NULL, NULL, NULL::smallint, NULL::integer, NULL,
                            NULL::timestamptz, NULL::bigint[]
                       FROM unnest(p_lanes, parked_to, parked_in) AS u (lane, vt, parked) WHERE u.parked > 0 OR more;
    END IF;
END $$;
