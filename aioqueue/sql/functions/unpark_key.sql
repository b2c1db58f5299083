-- unpark_key: parked → ready, for up to p_wanted jobs that stand under one key, oldest first, if the key has room.
-- Precondition: the key is locked (lock_keys). Held rows are counted in a statement of its own, from the position p_held; the
-- parked ones are looked at from p_parked on, below which the caller knows of none, and locked with SKIP LOCKED: a cancel in a
-- transaction left open keeps nobody waiting. p_wanted NULL: as many as there is room for.
-- p_idle: lanes of which nothing is claimed, p_served (NULL: unknown): lanes of which only anything is. Jobs of other lanes do not
-- count and go too, where they stand before those that do: ready they are in nobody's way, parked they would hold up all others.
-- In front: XID first, then V, and tags from V on, since these jobs have waited before the tenant's others. Without a limit any
-- more there may be very many: they go behind the tenant's others, by make_ready, so that they come in no burst.
-- first: where the key's first parked row now stands (or the next will). Served by parked_pkey, held_pkey, limits_pkey.
CREATE OR REPLACE FUNCTION aioqueue.unpark_key(
    p_key bigint, p_wanted integer, p_held bigint, p_parked bigint, p_limit integer, p_idle bigint[] DEFAULT '{}',
    p_served bigint[] DEFAULT NULL, OUT moved integer, OUT first bigint
) LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    rule bigint; most integer; room integer; limited boolean; number integer;
    ids uuid[]; lanes bigint[]; tenants text[]; attempts integer[]; spareds integer[];
BEGIN
    moved := 0;
    SELECT p.pos, p.rule INTO first, rule FROM aioqueue.parked p WHERE p.key = p_key AND p.pos >= p_parked ORDER BY p.pos LIMIT 1;
    IF NOT FOUND THEN
        first := pg_catalog.pg_sequence_last_value('aioqueue.pos'::regclass) + 1;
        RETURN;
    END IF;
    SELECT CASE WHEN l.paused THEN 0 ELSE l.max_running END INTO most FROM aioqueue.limits l WHERE l.key = rule;
    limited := most IS NOT NULL;
    room := p_limit;
    IF limited THEN
        SELECT most - count(*) INTO room FROM (
            SELECT FROM aioqueue.held h WHERE h.key = p_key AND h.pos >= p_held ORDER BY h.pos LIMIT most) h;
    END IF;
    IF room <= 0 THEN
        RETURN;
    END IF;
    number := least(coalesce(p_wanted, room), p_limit);
    IF limited AND (p_idle <> '{}' OR p_served IS NOT NULL) THEN
        -- Up to the one that would be too many.
        SELECT x.n - 1 INTO number
          FROM (SELECT y.lane, row_number() OVER (ORDER BY y.pos) AS n
                  FROM (SELECT p.lane, p.pos FROM aioqueue.parked p WHERE p.key = p_key AND p.pos >= first ORDER BY p.pos LIMIT p_limit) y) x
         WHERE x.lane <> ALL (p_idle) AND (p_served IS NULL OR x.lane = ANY (p_served)) ORDER BY x.n OFFSET number LIMIT 1;
        number := coalesce(number, p_limit);
    END IF;
    WITH d AS (
        DELETE FROM aioqueue.parked r WHERE r.ctid = ANY (ARRAY(
               SELECT p.ctid FROM aioqueue.parked p WHERE p.key = p_key AND p.pos >= first
                ORDER BY p.pos LIMIT number FOR UPDATE SKIP LOCKED))
        RETURNING r.*)
    SELECT array_agg(d.job_id), array_agg(d.lane), array_agg(d.tenant), array_agg(d.attempt), array_agg(d.spared)
      INTO ids, lanes, tenants, attempts, spareds FROM (SELECT * FROM d ORDER BY d.pos) d;
    IF ids IS NULL THEN
        RETURN;
    END IF;
    moved := cardinality(ids);
    IF limited THEN
        PERFORM pg_catalog.pg_current_xact_id();
        INSERT INTO aioqueue.live (lane, vt, job_id, tenant, attempt, spared)
        SELECT g.lane, g.v + g.step * o.n, ids[o.i], g.tenant, attempts[o.i], spareds[o.i]
          FROM (SELECT x.lane, x.tenant, array_agg(x.i) AS members, aioqueue.virtual_time(x.lane) AS v,
                       (SELECT s.step FROM aioqueue.step(x.tenant) s) AS step
                  FROM unnest(lanes, tenants) WITH ORDINALITY AS x (lane, tenant, i) GROUP BY x.lane, x.tenant) g,
               unnest(g.members) WITH ORDINALITY AS o (i, n);
    ELSE
        PERFORM aioqueue.make_ready(lanes, ids, tenants, attempts, spareds);
    END IF;
    SELECT p.pos INTO first FROM aioqueue.parked p WHERE p.key = p_key AND p.pos >= first ORDER BY p.pos LIMIT 1;
    IF NOT FOUND THEN
        first := pg_catalog.pg_sequence_last_value('aioqueue.pos'::regclass) + 1;
    END IF;
END $$;
