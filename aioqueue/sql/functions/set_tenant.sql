-- set_tenant: a tenant's weight (NULL: 1), limit of running jobs (NULL: none) and pause, as they are to be from now on;
-- parameters in p_keep ('weight', 'max_running', 'paused') stay as they are. In the caller's transaction. Locks the tenant's rows.
-- Afterwards, each in a transaction of its own: wait_for_claims and settle_limits, so that no claim in flight breaks it; where the weight changed
-- (first result), park_tenant until it returns less than asked; and sweep_parked for the tenant's key (second result).
CREATE OR REPLACE FUNCTION aioqueue.set_tenant(
    p_tenant text, p_weight double precision, p_max_running integer, p_paused boolean, p_keep text[] DEFAULT '{}',
    OUT reweighed boolean, OUT key bigint
) LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    r aioqueue.limits; old double precision;
BEGIN
    IF p_tenant IS NULL OR btrim(p_tenant) = '' OR length(p_tenant) > 200 THEN
        RAISE invalid_parameter_value USING MESSAGE = 'tenant: expected a name of 1 to 200 characters, got ' || coalesce(quote_literal(left(p_tenant, 40)), 'NULL');
    END IF;
    IF p_weight NOT BETWEEN 0.01 AND 100 OR p_max_running < 1 THEN
        RAISE invalid_parameter_value USING MESSAGE = 'expected a weight of 0.01 to 100 and a limit of 1 or more, got ' || coalesce(p_weight::text, 'NULL') || ' and ' || coalesce(p_max_running::text, 'NULL');
    END IF;
    key := aioqueue.limit_key('tenant', p_tenant);
    -- One change of a tenant at a time: what is kept must be what stays.
    PERFORM pg_advisory_xact_lock(hashtextextended('aioqueue.set_tenant', key));
    SELECT l.* INTO r FROM aioqueue.limits l WHERE l.kind = 'tenant' AND l.name = p_tenant;
    SELECT t.weight INTO old FROM aioqueue.tenant t WHERE t.name = p_tenant;
    PERFORM aioqueue.set_limit(
        'tenant', p_tenant, CASE WHEN 'max_running' = ANY (p_keep) THEN r.max_running ELSE p_max_running END,
        CASE WHEN 'paused' = ANY (p_keep) THEN coalesce(r.paused, false) ELSE coalesce(p_paused, false) END);
    reweighed := NOT 'weight' = ANY (p_keep) AND coalesce(old, 1) <> coalesce(p_weight, 1);
    IF reweighed AND coalesce(p_weight, 1) = 1 THEN
        DELETE FROM aioqueue.tenant t WHERE t.name = p_tenant;
    ELSIF reweighed THEN
        INSERT INTO aioqueue.tenant AS t (name, weight) VALUES (p_tenant, p_weight) ON CONFLICT (name) DO UPDATE SET weight = excluded.weight;
    END IF;
END $$;
