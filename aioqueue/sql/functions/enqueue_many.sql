-- enqueue_many: (nothing) → ready or scheduled, for a jsonb array of jobs, in the caller's transaction; ids in order.
-- A job: {"task", "payload", "tenant", "queue", "priority", "delay", "run_at", "max_attempts", "id", "key", "retry_of"};
-- all but task may be left out. delay is an interval or seconds. Options left out come from table task, then from the defaults.
-- Jobs that differ in id and payload only may come as one object, with "ids" and "payloads": as clients of schema 12 give them to it,
-- later ones call enqueue_alike.
-- XID first, then clock and tags (ENGINE.md, invariant 1). Locks nothing that others wait for; makes no row that others use.
-- A job without a tenant, of a task whose workers require one, is SQLSTATE AQ004.
-- An id that exists already with the same job is success and adds nothing; with another job it is unique_violation.
CREATE OR REPLACE FUNCTION aioqueue.enqueue_many(jobs jsonb) RETURNS SETOF uuid
LANGUAGE plpgsql VOLATILE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET jit = off SET plan_cache_mode = force_generic_plan
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_sort = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
    ids uuid[]; tasks text[]; queues text[]; tenants text[]; priorities integer[]; max_attempts_ integer[]; due timestamptz[]; keys text[];
    lanes bigint[]; inserted uuid[]; at timestamptz; bad record; homeless text; later boolean; both_given boolean; n integer; lane_of jsonb;
BEGIN
    IF jsonb_typeof(jobs) = 'object' AND jobs ? 'ids' THEN
        IF jsonb_array_length(jobs -> 'ids') <> jsonb_array_length(jobs -> 'payloads') THEN
            RAISE invalid_parameter_value USING MESSAGE = 'jobs: expected as many payloads as ids';
        END IF;
        SELECT coalesce(array_agg(e::uuid), '{}') INTO ids FROM jsonb_array_elements_text(jobs -> 'ids') AS e;
        PERFORM aioqueue.enqueue_alike(
            ids, (SELECT string_agg(e::text, E'\n') FROM jsonb_array_elements(jobs -> 'payloads') AS e), jobs ->> 'task', jobs ->> 'tenant',
            jobs ->> 'queue', (jobs ->> 'priority')::integer, (jobs ->> 'delay')::interval, (jobs ->> 'run_at')::timestamptz,
            (jobs ->> 'max_attempts')::integer, jobs ->> 'key');
        RETURN QUERY SELECT unnest(ids);
        RETURN;
    END IF;
    IF jsonb_typeof(jobs) IS DISTINCT FROM 'array' THEN
        RAISE invalid_parameter_value USING MESSAGE = 'jobs: expected a jsonb array of objects, got ' || coalesce(jsonb_typeof(jobs), 'NULL');
    END IF;
    PERFORM pg_current_xact_id();
    at := clock_timestamp();
    SELECT array_agg(coalesce((e.v ->> 'id')::uuid, aioqueue.uuidv7())), array_agg(e.v ->> 'task'),
           array_agg(coalesce(e.v ->> 'queue', t.queue, 'default')), array_agg(e.v ->> 'tenant'),
           array_agg(coalesce((e.v ->> 'priority')::integer, t.priority, 0)),
           array_agg(coalesce((e.v ->> 'max_attempts')::integer, t.max_attempts, 5)),
           array_agg(coalesce((e.v ->> 'run_at')::timestamptz, at + (e.v ->> 'delay')::interval)), array_agg(e.v ->> 'key'),
           coalesce(bool_or(coalesce((e.v ->> 'run_at')::timestamptz, at + (e.v ->> 'delay')::interval) > at), false),
           coalesce(bool_or(e.v ->> 'run_at' IS NOT NULL AND e.v ->> 'delay' IS NOT NULL), false), count(*),
           min(e.v ->> 'task') FILTER (WHERE t.require_tenant AND e.v ->> 'tenant' IS NULL)
      INTO ids, tasks, queues, tenants, priorities, max_attempts_, due, keys, later, both_given, n, homeless
      FROM jsonb_array_elements(jobs) AS e (v)
      LEFT JOIN LATERAL (SELECT k.queue, k.priority, k.max_attempts, k.require_tenant FROM aioqueue.task k
                          WHERE (e.v ->> 'queue' IS NULL OR e.v ->> 'priority' IS NULL OR e.v ->> 'max_attempts' IS NULL OR e.v ->> 'tenant' IS NULL)
                            AND k.name = e.v ->> 'task' LIMIT 1) t ON true;
    IF n = 0 THEN
        RETURN;
    END IF;
    IF homeless IS NOT NULL THEN
        RAISE EXCEPTION USING ERRCODE = 'AQ004', MESSAGE = 'tenant: task ' || homeless || ' runs for a tenant only; name one';
    END IF;
    IF both_given THEN
        RAISE invalid_parameter_value USING MESSAGE = 'delay, run_at: expected one of them at most, got both';
    END IF;
    SELECT x.i, x.reason INTO bad
      FROM (SELECT u.i, aioqueue.job_refusal(u.task, u.queue, u.tenant, u.key, u.priority, u.max_attempts, u.due) AS reason
              FROM unnest(tasks, queues, tenants, priorities, max_attempts_, due, keys) WITH ORDINALITY AS u (task, queue, tenant, priority, max_attempts, due, key, i)) x
     WHERE x.reason IS NOT NULL LIMIT 1;
    IF FOUND THEN
        RAISE invalid_parameter_value USING MESSAGE = 'job ' || bad.i || ' of ' || n || ': ' || bad.reason;
    END IF;
    WITH i AS (
        INSERT INTO aioqueue.job AS j (id, task, queue, tenant, priority, max_attempts, payload, created_at, run_at, retry_of, key)
        SELECT ids[e.i], tasks[e.i], queues[e.i], coalesce(tenants[e.i], ''), priorities[e.i], max_attempts_[e.i],
               coalesce(e.v -> 'payload', '{}'), at, due[e.i], (e.v ->> 'retry_of')::uuid, keys[e.i]
          FROM jsonb_array_elements(jobs) WITH ORDINALITY AS e (v, i)
        ON CONFLICT DO NOTHING RETURNING j.id)
    SELECT array_agg(i.id) INTO inserted FROM i;
    IF coalesce(cardinality(inserted), 0) < n THEN
        PERFORM aioqueue.same_jobs(jobs, ids, tasks, tenants);
    END IF;
    -- A lane's name is worked out once, not for each of its jobs.
    SELECT jsonb_object_agg(d.priority || ':' || d.queue, aioqueue.lane(d.queue, d.priority)) INTO lane_of
      FROM (SELECT u.queue, u.priority FROM unnest(queues, priorities) AS u (queue, priority) GROUP BY u.queue, u.priority) d;
    -- From here on only what is new; the arrays stay parallel.
    SELECT array_agg((lane_of ->> (u.priority || ':' || u.queue))::bigint), array_agg(coalesce(u.tenant, '')), array_agg(u.due), array_agg(u.id)
      INTO lanes, tenants, due, inserted
      FROM unnest(ids, queues, priorities, tenants, due) WITH ORDINALITY AS u (id, queue, priority, tenant, due, i)
     WHERE cardinality(inserted) = n OR u.id = ANY (inserted) AND array_position(ids, u.id) = u.i;
    IF inserted IS NOT NULL AND NOT later THEN
        PERFORM aioqueue.make_ready(lanes, inserted, tenants, array_fill(0, ARRAY[cardinality(inserted)]), array_fill(0, ARRAY[cardinality(inserted)]));
    ELSIF inserted IS NOT NULL THEN
        INSERT INTO aioqueue.scheduled (run_at, job_id, lane, tenant)
        SELECT greatest(u.due, clock_timestamp()), u.id, u.lane, u.tenant
          FROM unnest(due, inserted, lanes, tenants) AS u (due, id, lane, tenant) WHERE u.due > at;
        PERFORM aioqueue.make_ready(array_agg(u.lane), array_agg(u.id), array_agg(u.tenant), array_agg(0), array_agg(0))
           FROM unnest(due, inserted, lanes, tenants) AS u (due, id, lane, tenant) WHERE u.due IS NULL OR u.due <= at HAVING count(*) > 0;
    END IF;
    RETURN QUERY SELECT unnest(ids);
END $$;
