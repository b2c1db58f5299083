-- make_ready: puts jobs into live at new positions: enqueue, promotion, retry, rescue and hand-back alike.
-- XID first, then the tags. The jobs of one (lane, tenant) follow each other a step apart (1000 / its weight), so that a big
-- tenant's jobs that become ready together come in no burst. Arrays run in parallel; tenants '' is none.
CREATE OR REPLACE FUNCTION aioqueue.make_ready(
    p_lanes bigint[], p_job_ids uuid[], p_tenants text[], p_attempts integer[], p_spared integer[]
) RETURNS void
LANGUAGE plpgsql VOLATILE AS $$
DECLARE weighted boolean := EXISTS (SELECT FROM aioqueue.tenant);
BEGIN
    PERFORM pg_catalog.pg_current_xact_id();
    INSERT INTO aioqueue.live (lane, vt, job_id, tenant, attempt, spared)
    SELECT g.lane, g.tag + g.step * o.n, p_job_ids[o.i], g.tenant, p_attempts[o.i], p_spared[o.i]
      FROM (SELECT y.lane, y.tenant, y.members, y.step, aioqueue.next_tag(y.lane, y.tenant, y.step, cardinality(y.members)) AS tag
              FROM (SELECT x.lane, x.tenant, array_agg(x.i) AS members,
                           CASE WHEN weighted THEN (SELECT s.step FROM aioqueue.step(x.tenant) s) ELSE 1000 END AS step
                      FROM unnest(p_lanes, p_tenants) WITH ORDINALITY AS x (lane, tenant, i)
                     GROUP BY x.lane, x.tenant) y) g,
           unnest(g.members) WITH ORDINALITY AS o (i, n);
END $$;
