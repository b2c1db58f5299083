-- retry_job: a dead or cancelled job is run again as a NEW job with retry_of; the old one keeps its end. Returns the new
-- id, or NULL for a job that is unknown to the tenant (NULL: any). Raises object_not_in_prerequisite_state otherwise.
CREATE OR REPLACE FUNCTION aioqueue.retry_job(p_job_id uuid, p_tenant text DEFAULT NULL) RETURNS uuid
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    j aioqueue.job; ended text;
BEGIN
    SELECT x.* INTO j FROM aioqueue.job x WHERE x.id = p_job_id AND (p_tenant IS NULL OR x.tenant = p_tenant);
    IF NOT FOUND THEN
        RETURN NULL;
    END IF;
    SELECT o.state INTO ended FROM aioqueue.outcome o WHERE o.job_id = p_job_id;
    IF ended IS NULL OR ended NOT IN ('dead', 'cancelled') THEN
        RAISE object_not_in_prerequisite_state USING MESSAGE = 'job ' || p_job_id || ' is neither dead nor cancelled but ' || coalesce(ended, 'unfinished');
    END IF;
    RETURN (SELECT e FROM aioqueue.enqueue_many(jsonb_build_array(jsonb_build_object(
        'task', j.task, 'payload', j.payload, 'tenant', nullif(j.tenant, ''), 'queue', j.queue, 'priority', j.priority,
        'max_attempts', j.max_attempts, 'key', j.key, 'retry_of', j.id))) AS e);
END $$;
