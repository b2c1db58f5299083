-- job_refusal: why a job cannot be enqueued: the first of its options that is not allowed, with what was expected; NULL: it can.
-- One expression, which the planner puts in place of the call.
CREATE OR REPLACE FUNCTION aioqueue.job_refusal(
    task text, queue text, tenant text, key text, priority integer, max_attempts integer, due timestamptz
) RETURNS text
LANGUAGE sql STABLE AS $$
    SELECT CASE
        WHEN task IS NULL OR btrim(task) = '' OR length(task) > 200 THEN 'task: expected a name of 1 to 200 characters, got ' || coalesce(quote_literal(left(task, 40)), 'NULL')
        WHEN btrim(queue) = '' OR length(queue) > 200 THEN 'queue: expected a name of 1 to 200 characters, got ' || quote_literal(left(queue, 40))
        WHEN btrim(tenant) = '' OR length(tenant) > 200 THEN 'tenant: expected a name of 1 to 200 characters or NULL, got ' || quote_literal(left(tenant, 40))
        WHEN btrim(key) = '' OR length(key) > 200 THEN 'key: expected a name of 1 to 200 characters or NULL, got ' || quote_literal(left(key, 40))
        WHEN priority NOT BETWEEN -2 AND 2 THEN 'priority: expected -2 to 2, got ' || priority
        WHEN max_attempts NOT BETWEEN 1 AND 10000 THEN 'max_attempts: expected 1 to 10000, got ' || max_attempts
        WHEN due NOT BETWEEN '0001-01-02Z' AND '9999-12-30Z' THEN 'run_at, delay: expected a time of the years 1 to 9999, got ' || due
    END
$$;
