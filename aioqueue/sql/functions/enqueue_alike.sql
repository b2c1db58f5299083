-- enqueue_alike: (nothing) → ready or scheduled, for jobs that differ in id and payload only, in the caller's transaction; its XID.
-- Options as in enqueue_many, NULL for those left out; p_payloads: the JSON of each, one a line, which the server reads in half
-- the time that one array or as many objects take.
-- In parts, of one transaction: the first says in p_total how many jobs they are all together, the others say 0. 64 parts of its
-- size at most: positions are not to run away with what somebody says.
-- Everything that enqueue_many says holds here: XID first, then clock and tags; locks nothing that others wait for.
-- One job goes without a plan for many; as the first of its transaction without next_tag too, whose answer it works out while it
-- is written, if nobody else's rows are unseen. Each expression costs: they are made anew for every transaction.
-- From 100 jobs on a plain INSERT in a subtransaction is cheaper than to look for each id. Where one is there already it is undone,
-- and they are looked for; of fewer, a transaction with more than 64 subtransactions would make all snapshots dearer.
CREATE OR REPLACE FUNCTION aioqueue.enqueue_alike(
    p_ids uuid[], p_payloads text, p_task text, p_tenant text DEFAULT NULL, p_queue text DEFAULT NULL, p_priority integer DEFAULT NULL,
    p_delay interval DEFAULT NULL, p_run_at timestamptz DEFAULT NULL, p_max_attempts integer DEFAULT NULL, p_key text DEFAULT NULL,
    p_total integer DEFAULT NULL
) RETURNS text
LANGUAGE plpgsql VOLATILE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET jit = off SET plan_cache_mode = force_generic_plan
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_sort = off
AS $$
DECLARE
    alone boolean := pg_current_xact_id_if_assigned() IS NULL; xid text := pg_current_xact_id()::text;
    at timestamptz := clock_timestamp(); n integer := cardinality(p_ids);
    t aioqueue.task; due timestamptz; bad text; lane_ bigint; v bigint; tag bigint; apart bigint := 1000; fresh uuid[];
BEGIN
    IF n = 0 THEN
        RETURN xid;
    END IF;
    IF p_tenant IS NOT NULL THEN
        apart := (SELECT s.step FROM aioqueue.step(p_tenant) s);
    ELSIF (SELECT k.require_tenant FROM aioqueue.task k WHERE k.name = p_task) THEN
        RAISE EXCEPTION USING ERRCODE = 'AQ004', MESSAGE = 'tenant: task ' || p_task || ' runs for a tenant only; name one';
    END IF;
    IF p_queue IS NULL OR p_priority IS NULL OR p_max_attempts IS NULL THEN
        SELECT k.* INTO t FROM aioqueue.task k WHERE k.name = p_task;
        p_queue := coalesce(p_queue, t.queue, 'default'); p_priority := coalesce(p_priority, t.priority, 0);
        p_max_attempts := coalesce(p_max_attempts, t.max_attempts, 5);
    END IF;
    IF p_run_at IS NOT NULL OR p_delay IS NOT NULL THEN
        IF p_run_at IS NOT NULL AND p_delay IS NOT NULL THEN
            RAISE invalid_parameter_value USING MESSAGE = 'delay, run_at: expected one of them at most, got both';
        END IF;
        due := coalesce(p_run_at, at + p_delay);
    END IF;
    -- What job_refusal need not be asked about, in few expressions.
    IF (p_task IS NOT NULL AND due IS NULL AND p_priority BETWEEN -2 AND 2 AND p_max_attempts BETWEEN 1 AND 10000
        AND least(p_task COLLATE "C", p_queue, p_tenant, p_key) > '!'
        AND greatest(octet_length(p_task), octet_length(p_queue), octet_length(p_tenant), octet_length(p_key)) <= 200) IS NOT TRUE THEN
        bad := aioqueue.job_refusal(p_task, p_queue, p_tenant, p_key, p_priority, p_max_attempts, due);
        IF bad IS NOT NULL THEN
            RAISE invalid_parameter_value USING MESSAGE = 'job 1 of ' || n || ': ' || bad;
        END IF;
    END IF;
    lane_ := aioqueue.lane(p_queue, p_priority);
    IF n = 1 THEN
        INSERT INTO aioqueue.job (id, task, queue, tenant, priority, max_attempts, payload, created_at, run_at, key)
        VALUES (p_ids[1], p_task, p_queue, coalesce(p_tenant, ''), p_priority, p_max_attempts, p_payloads::jsonb, at, due, p_key)
        ON CONFLICT DO NOTHING;
        IF NOT FOUND THEN
            PERFORM aioqueue.same_jobs(
                jsonb_build_array(jsonb_build_object('payload', p_payloads::jsonb)), p_ids, ARRAY[p_task], ARRAY[p_tenant]);
            RETURN xid;
        END IF;
        p_tenant := coalesce(p_tenant, '');
        IF alone AND due IS NULL AND p_total IS NULL AND current_setting('transaction_isolation') <> 'serializable'
           AND pg_try_advisory_xact_lock(hashtextextended(p_tenant, lane_)) THEN
            v := aioqueue.virtual_time(lane_);
            INSERT INTO aioqueue.live (lane, vt, job_id, tenant, attempt, spared)
            SELECT lane_, apart + greatest(v, (SELECT l.vt FROM aioqueue.live l
                                                WHERE l.lane = lane_ AND l.tenant = p_tenant AND l.vt >= v ORDER BY l.vt DESC LIMIT 1)),
                   p_ids[1], p_tenant, 0, 0;
            RETURN xid;
        END IF;
        fresh := p_ids;
    ELSIF n >= 100 THEN
        BEGIN
            INSERT INTO aioqueue.job (id, task, queue, tenant, priority, max_attempts, payload, created_at, run_at, key)
            SELECT e.id, p_task, p_queue, coalesce(p_tenant, ''), p_priority, p_max_attempts, e.payload::jsonb, at, due, p_key
              FROM ROWS FROM (unnest(p_ids), string_to_table(p_payloads, E'\n')) AS e (id, payload);
            fresh := p_ids;
        EXCEPTION WHEN unique_violation THEN
            NULL;
        END;
    END IF;
    IF fresh IS NULL THEN
        WITH i AS (
            INSERT INTO aioqueue.job AS j (id, task, queue, tenant, priority, max_attempts, payload, created_at, run_at, key)
            SELECT e.id, p_task, p_queue, coalesce(p_tenant, ''), p_priority, p_max_attempts, e.payload::jsonb, at, due, p_key
              FROM ROWS FROM (unnest(p_ids), string_to_table(p_payloads, E'\n')) AS e (id, payload)
            ON CONFLICT DO NOTHING RETURNING j.id)
        SELECT array_agg(i.id) INTO fresh FROM i;
        IF coalesce(cardinality(fresh), 0) < n THEN
            PERFORM aioqueue.same_jobs(
                (SELECT jsonb_agg(jsonb_build_object('payload', e::jsonb)) FROM string_to_table(p_payloads, E'\n') AS e),
                p_ids, array_fill(p_task, ARRAY[n]), array_fill(p_tenant, ARRAY[n]));
        END IF;
        IF fresh IS NULL THEN
            RETURN xid;
        END IF;
    END IF;
    p_tenant := coalesce(p_tenant, '');
    IF due > at THEN
        INSERT INTO aioqueue.scheduled (run_at, job_id, lane, tenant)
        SELECT greatest(due, clock_timestamp()), u, lane_, p_tenant FROM unnest(fresh) AS u;
    ELSE
        tag := aioqueue.next_tag(lane_, p_tenant, apart, least(coalesce(p_total, cardinality(fresh)), 64 * n));
        INSERT INTO aioqueue.live (lane, vt, job_id, tenant, attempt, spared)
        SELECT lane_, tag + apart * u.i, u.id, p_tenant, 0, 0 FROM unnest(fresh) WITH ORDINALITY AS u (id, i);
    END IF;
    RETURN xid;
END $$;
