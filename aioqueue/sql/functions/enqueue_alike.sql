-- enqueue_alike: (nothing) → ready or scheduled, for jobs that differ in id and payload only, in the caller's transaction; its XID.
-- p_options: {"task", "tenant", "queue", "priority", "delay", "run_at", "max_attempts", "key"}, as in enqueue_many; p_payloads:
-- the JSON of each, one a line, which the server reads in half the time that one array or as many objects take.
-- In parts, of one transaction: the first says in "total" how many jobs they are all together, the others say 0. 64 parts of its
-- size at most: positions are not to run away with what somebody says.
-- Everything that enqueue_many says holds here: XID first, then clock and tags; locks nothing that others wait for.
-- One job goes without a plan for many. From 100 jobs on a plain INSERT in a subtransaction is cheaper than to look for each id. Where one is there already it is undone,
-- and they are looked for; of fewer, a transaction with more than 64 subtransactions would make all snapshots dearer.
CREATE OR REPLACE FUNCTION aioqueue.enqueue_alike(p_options jsonb, p_ids uuid[], p_payloads text) RETURNS text
LANGUAGE plpgsql VOLATILE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET jit = off SET plan_cache_mode = force_generic_plan
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_sort = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
    xid text := pg_current_xact_id(); at timestamptz := clock_timestamp(); n integer := cardinality(p_ids);
    task_ text := p_options ->> 'task'; tenant_ text := p_options ->> 'tenant'; queue_ text := p_options ->> 'queue';
    key_ text := p_options ->> 'key'; priority_ integer := p_options ->> 'priority'; attempts integer := p_options ->> 'max_attempts';
    t aioqueue.task; due timestamptz; bad text; lane bigint; tag bigint; apart bigint; fresh uuid[];
BEGIN
    IF n = 0 THEN
        RETURN xid;
    END IF;
    IF tenant_ IS NULL OR queue_ IS NULL OR priority_ IS NULL OR attempts IS NULL THEN
        SELECT k.* INTO t FROM aioqueue.task k WHERE k.name = task_;
        IF t.require_tenant AND tenant_ IS NULL THEN
            RAISE EXCEPTION USING ERRCODE = 'AQ004', MESSAGE = 'tenant: task ' || task_ || ' runs for a tenant only; name one';
        END IF;
        queue_ := coalesce(queue_, t.queue, 'default'); priority_ := coalesce(priority_, t.priority, 0);
        attempts := coalesce(attempts, t.max_attempts, 5);
    END IF;
    IF p_options ? 'run_at' OR p_options ? 'delay' THEN
        IF p_options ->> 'run_at' IS NOT NULL AND p_options ->> 'delay' IS NOT NULL THEN
            RAISE invalid_parameter_value USING MESSAGE = 'delay, run_at: expected one of them at most, got both';
        END IF;
        due := coalesce((p_options ->> 'run_at')::timestamptz, at + (p_options ->> 'delay')::interval);
    END IF;
    bad := aioqueue.job_refusal(task_, queue_, tenant_, key_, priority_, attempts, due);
    IF bad IS NOT NULL THEN
        RAISE invalid_parameter_value USING MESSAGE = 'job 1 of ' || n || ': ' || bad;
    END IF;
    IF n = 1 THEN
        INSERT INTO aioqueue.job (id, task, queue, tenant, priority, max_attempts, payload, created_at, run_at, key)
        VALUES (p_ids[1], task_, queue_, coalesce(tenant_, ''), priority_, attempts, p_payloads::jsonb, at, due, key_)
        ON CONFLICT DO NOTHING;
        IF NOT FOUND THEN
            PERFORM aioqueue.same_jobs(
                jsonb_build_array(jsonb_build_object('payload', p_payloads::jsonb)), p_ids, ARRAY[task_], ARRAY[tenant_]);
            RETURN xid;
        END IF;
        fresh := p_ids;
    ELSIF n >= 100 THEN
        BEGIN
            INSERT INTO aioqueue.job (id, task, queue, tenant, priority, max_attempts, payload, created_at, run_at, key)
            SELECT e.id, task_, queue_, coalesce(tenant_, ''), priority_, attempts, e.payload::jsonb, at, due, key_
              FROM ROWS FROM (unnest(p_ids), string_to_table(p_payloads, E'\n')) AS e (id, payload);
            fresh := p_ids;
        EXCEPTION WHEN unique_violation THEN
            NULL;
        END;
    END IF;
    IF fresh IS NULL THEN
        WITH i AS (
            INSERT INTO aioqueue.job AS j (id, task, queue, tenant, priority, max_attempts, payload, created_at, run_at, key)
            SELECT e.id, task_, queue_, coalesce(tenant_, ''), priority_, attempts, e.payload::jsonb, at, due, key_
              FROM ROWS FROM (unnest(p_ids), string_to_table(p_payloads, E'\n')) AS e (id, payload)
            ON CONFLICT DO NOTHING RETURNING j.id)
        SELECT array_agg(i.id) INTO fresh FROM i;
        IF coalesce(cardinality(fresh), 0) < n THEN
            PERFORM aioqueue.same_jobs(
                (SELECT jsonb_agg(jsonb_build_object('payload', e::jsonb)) FROM string_to_table(p_payloads, E'\n') AS e),
                p_ids, array_fill(task_, ARRAY[n]), array_fill(tenant_, ARRAY[n]));
        END IF;
        IF fresh IS NULL THEN
            RETURN xid;
        END IF;
    END IF;
    lane := aioqueue.lane(queue_, priority_); tenant_ := coalesce(tenant_, '');
    IF due > at THEN
        INSERT INTO aioqueue.scheduled (run_at, job_id, lane, tenant)
        SELECT greatest(due, clock_timestamp()), u, lane, tenant_ FROM unnest(fresh) AS u;
    ELSE
        apart := aioqueue.step(tenant_);
        tag := aioqueue.next_tag(lane, tenant_, apart, coalesce(least((p_options ->> 'total')::integer, 64 * n), cardinality(fresh)));
        IF n = 1 THEN
            INSERT INTO aioqueue.live (lane, vt, job_id, tenant, attempt, spared) VALUES (lane, tag + apart, fresh[1], tenant_, 0, 0);
        ELSE
            INSERT INTO aioqueue.live (lane, vt, job_id, tenant, attempt, spared)
            SELECT lane, tag + apart * u.i, u.id, tenant_, 0, 0 FROM unnest(fresh) WITH ORDINALITY AS u (id, i);
        END IF;
    END IF;
    RETURN xid;
END $$;
