-- same_jobs: for ids that were there already: returns nothing if each names the same job (an enqueue tried again after a
-- lost connection), raises unique_violation otherwise. A job written by a transaction that this one cannot see is not the same.
CREATE OR REPLACE FUNCTION aioqueue.same_jobs(p_jobs jsonb, p_ids uuid[], p_tasks text[], p_tenants text[]) RETURNS void
LANGUAGE plpgsql VOLATILE AS $$
DECLARE other uuid;
BEGIN
    SELECT u.id INTO other FROM unnest(p_ids, p_tasks, p_tenants) WITH ORDINALITY AS u (id, task, tenant, i),
           LATERAL (SELECT count(*) AS n FROM aioqueue.job j
                     WHERE j.id = u.id AND j.task = u.task AND j.tenant = coalesce(u.tenant, '')
                       AND j.payload = coalesce(p_jobs -> (u.i::integer - 1) -> 'payload', '{}')) s
     WHERE s.n = 0 LIMIT 1;
    IF FOUND THEN
        RAISE unique_violation USING MESSAGE = 'job id ' || other || ' is taken by another job';
    END IF;
END $$;
