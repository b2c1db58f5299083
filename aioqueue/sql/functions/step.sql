-- step: how far apart a tenant's jobs stand in a lane: 1000 / its weight.
CREATE OR REPLACE FUNCTION aioqueue.step(p_tenant text) RETURNS bigint
LANGUAGE plpgsql STABLE AS $$
BEGIN
    RETURN coalesce((SELECT pg_catalog.round(1000 / t.weight)::bigint FROM aioqueue.tenant t WHERE t.name = p_tenant), 1000);
END $$;
