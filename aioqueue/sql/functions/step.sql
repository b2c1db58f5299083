-- step: how far apart a tenant's jobs stand in a lane: 1000 / its weight.
-- One query, which the planner puts in place of the call in a FROM.
CREATE OR REPLACE FUNCTION aioqueue.step(p_tenant text) RETURNS TABLE (step bigint)
LANGUAGE sql STABLE AS $$
    SELECT coalesce((SELECT pg_catalog.round(1000 / t.weight)::bigint FROM aioqueue.tenant t WHERE t.name = p_tenant), 1000)
$$;
