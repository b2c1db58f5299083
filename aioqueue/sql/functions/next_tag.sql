-- next_tag: the position after which a tenant's next jobs go in a lane (start-time fair queueing): max(V, the tenant's
-- last tag), in steps of p_step (1000 / the tenant's weight). Precondition: the transaction holds its XID already, or a floor
-- could pass the row unseen.
-- Open transactions do not see each other's rows, so the tag leaves room for those of others: k times as many as this one
-- brings (p_number, rounded up to a power of two), where k is the first number of this (lane, tenant, power) that no other
-- open transaction has locked. Try-locks only: nobody waits. One transaction takes at most 64 of them, which leaves the
-- server's lock table alone; later tenants of a huge batch may tie with another open batch, and so may one batch of each power.
-- p_number 0: more of what this transaction has brought already, and left room for; the tag goes on from there.
-- Served by live_tenant, backwards from the tenant's end; vt >= V keeps dead entries out. Not read under SERIALIZABLE,
-- where two enqueuers of one tenant would fail with 40001.
CREATE OR REPLACE FUNCTION aioqueue.next_tag(p_lane bigint, p_tenant text, p_step bigint DEFAULT 1000, p_number integer DEFAULT 1) RETURNS bigint
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    v      bigint := aioqueue.virtual_time(p_lane);
    last   bigint;
    k      integer := 0;
    class  integer := length(ltrim((greatest(p_number, 1) - 1)::bit(32)::text, '0'));
    locked integer := coalesce(nullif(pg_catalog.current_setting('aioqueue_tag.locks', true), ''), '0')::integer;
BEGIN
    IF pg_catalog.current_setting('transaction_isolation') <> 'serializable' THEN
        SELECT l.vt INTO last FROM aioqueue.live l
         WHERE l.lane = p_lane AND l.tenant = p_tenant AND l.vt >= v ORDER BY l.vt DESC LIMIT 1;
    END IF;
    IF locked < 64 AND p_number > 0 THEN
        WHILE k < 1000 AND NOT pg_catalog.pg_try_advisory_xact_lock(pg_catalog.hashtextextended(p_tenant, p_lane + 1024 * class + k)) LOOP
            k := k + 1;
        END LOOP;
        PERFORM pg_catalog.set_config('aioqueue_tag.locks', (locked + 1)::text, true);
    END IF;
    RETURN greatest(v, coalesce(last, v)) + p_step * k * (1 << class);
END $$;
