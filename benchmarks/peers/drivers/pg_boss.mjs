// pg-boss with batches, and burst so that a full batch is followed by the next at once.
import { version, dsn, options, payload, load, ran, main } from "./protocol.mjs";

const { PgBoss } = await load("pg-boss");
const batchSize = options.batch ?? 1000;
let boss, id;

await main({
  left: "SELECT EXISTS (SELECT FROM pgboss.job WHERE name = 'send' AND state < 'completed') AS left",
  async setup() {
    boss = new PgBoss({ connectionString: dsn, useListenNotify: true, schedule: false });
    boss.on("error", () => {});
    await boss.start();
    await boss.createQueue("send", { notify: true });
    const settings = `batchSize=${batchSize}, burstWhenBatchFull, notify, pollingIntervalSeconds=0.5`;
    return { version: version("pg-boss"), settings: `${settings}, node ${process.version}` };
  },
  async bulk(first, n) {
    for (let start = first; start < first + n; start += 10000) {
      const jobs = [];
      for (let i = start; i < Math.min(start + 10000, first + n); i++) jobs.push({ data: payload(i) });
      await boss.insert("send", jobs);
    }
  },
  async single(i) { await boss.send("send", payload(i)); },
  async start() {
    const how = { batchSize, burstWhenBatchFull: true, pollingIntervalSeconds: 0.5 };
    id = await boss.work("send", how, async (jobs) => { for (const job of jobs) { if (job.data.n < 0) throw new Error(); ran(); } });
  },
  async stop() { await boss.offWork("send"); },
});
