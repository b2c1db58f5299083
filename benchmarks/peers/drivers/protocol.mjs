// What both Node drivers share; the commands are those of protocol.py.
import { createRequire } from "node:module";
import readline from "node:readline";
import path from "node:path";
import { readFileSync } from "node:fs";

// Packages are looked for where the script is started, not where it stands.
export const find = createRequire(path.join(process.cwd(), "package.json"));
const pg = find("pg");

export const dsn = process.argv[2];
export const options = JSON.parse(process.argv[3]);
export const payload = (n) => ({ to: `someone${n}@example.org`, n, body: "x".repeat(60) });

export const version = (name) => JSON.parse(readFileSync(`node_modules/${name}/package.json`)).version;

export async function load(name) {
  return import(find.resolve(name));
}

const say = (answer) => process.stdout.write(JSON.stringify(answer) + "\n");
const seconds = () => performance.now() / 1000;
const cpu = () => { const used = process.cpuUsage(); return (used.user + used.system) / 1e6; };

let runs = 0, wanted = 0, serving = false, marks = [], finished = () => {};
export function ran() {
  runs += 1;
  if (serving) say({ ran: (performance.timeOrigin + performance.now()) / 1000 });
  else if (runs === 1 || (runs * 10) % wanted < 10) {
    marks.push(seconds());
    if (runs >= wanted) finished();
  }
}

async function drain(driver, n) {
  runs = 0; wanted = n; marks = []; serving = false;
  const done = new Promise((resolve) => { finished = resolve; });
  const before = cpu();
  const client = new pg.Client({ connectionString: dsn });
  await client.connect();
  await driver.start();
  await done;
  while (Object.values((await client.query(driver.left)).rows[0])[0]) await new Promise((resolve) => setTimeout(resolve, 5));
  const end = seconds();
  await client.end();
  const used = cpu() - before;
  await driver.stop();
  return { seconds: end - marks[0], tenths: marks.slice(1, 11).map((mark, i) => mark - marks[i]), cpu: used };
}

export async function main(driver) {
  let next = 0;
  for await (const line of readline.createInterface({ input: process.stdin })) {
    const [what, n] = JSON.parse(line);
    let answer = {};
    const begin = seconds();
    try {
      if (what === "setup") answer = await driver.setup();
      else if (what === "bulk") { await driver.bulk(next, n); next += n; answer = { seconds: seconds() - begin }; }
      else if (what === "single") {
        const at = [];
        for (let i = 0; i < n; i++) { at.push((performance.timeOrigin + performance.now()) / 1000); await driver.single(next++); }
        answer = { seconds: seconds() - begin, at };
      } else if (what === "drain") answer = await drain(driver, n);
      else if (what === "serve") { serving = true; await driver.start(); }
      else if (what === "work") { runs = 0; wanted = Infinity; serving = false; await driver.start(); }
      else if (what === "idle") answer = { runs, rss_mb: process.memoryUsage().rss / 1048576, cpu: cpu() };
      else throw new Error(`unknown command ${what}`);
    } catch (error) {
      answer = { error: String(error) };
    }
    say(answer);
  }
  process.exit(0);
}
