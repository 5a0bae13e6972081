//! The engine's loop with overlap, on a device of which only the step times exist.

use std::collections::{HashMap, VecDeque};
use std::ops::Range;
use std::time::Duration;

use inflight_scheduler::{
    Batch, Decision, MemoryConfig, Policy, Preemption, Scheduler, SchedulerConfig, SequenceId,
    SequenceSpec, Service, Tenant,
};

/// 8B parameters in bf16, keys and values of 128 KiB a token, on an H200 at 80 % of its bandwidth
/// and 35 % of its arithmetic.
const WEIGHTS_BYTES: f64 = 15e9;
const KV_BYTES: f64 = 131_072.0;
const BYTES_PER_S: f64 = 0.8 * 4.8e12;
const FLOP_PER_TOKEN: f64 = 2.0 * 7.5e9;
/// 32 layers, 4096 wide: a multiplication and an addition for scores and for values.
const FLOP_PER_PAIR: f64 = 32.0 * 4096.0 * 4.0;
const FLOP_PER_S: f64 = 0.35 * 989e12;
/// More for a step with a chunk, as measured: it is launched operator by operator.
const CHUNK_S: f64 = 12e-3;

/// A request.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Job {
    pub(crate) at_s: f64,
    pub(crate) prompt_len: usize,
    pub(crate) max_tokens: usize,
    pub(crate) tenant: &'static str,
}

/// When tokens came, by the jobs' places.
#[derive(Debug)]
pub(crate) struct Report {
    arrivals: Vec<f64>,
    tokens: Vec<Vec<f64>>,
    max_tokens: Vec<usize>,
    pub(crate) decisions: Vec<Decision>,
    pub(crate) end_s: f64,
    /// Units of service by tenant at the end.
    pub(crate) service: HashMap<String, u64>,
}

impl Report {
    /// A quantile of the milliseconds between tokens of some jobs.
    pub(crate) fn itl_ms(&self, jobs: Range<usize>, part: f64) -> f64 {
        quantile(self.gaps(jobs).map(|(_, gap)| gap).collect(), part)
    }

    pub(crate) fn mean_itl_ms(&self, jobs: Range<usize>) -> f64 {
        let gaps: Vec<f64> = self.gaps(jobs).map(|(_, gap)| gap).collect();
        gaps.iter().sum::<f64>() / gaps.len() as f64
    }

    /// The same, of gaps that end while job `prompt` has come and has no token yet.
    pub(crate) fn itl_ms_while_prompting(
        &self,
        jobs: Range<usize>,
        prompt: usize,
        part: f64,
    ) -> f64 {
        let (from, to) = (self.arrivals[prompt], self.tokens[prompt][0]);
        let beside = self.gaps(jobs).filter(|(at, _)| (from..=to).contains(at));
        quantile(beside.map(|(_, gap)| gap).collect(), part)
    }

    /// A quantile of the seconds from arrival to last token.
    pub(crate) fn latency_s(&self, jobs: Range<usize>, part: f64) -> f64 {
        let last = |job: usize| self.tokens[job].last().expect("it ended") - self.arrivals[job];
        quantile(jobs.map(last).collect(), part)
    }

    pub(crate) fn has_ended(&self, job: usize) -> bool {
        self.tokens[job].len() == self.max_tokens[job]
    }

    fn gaps(&self, jobs: Range<usize>) -> impl Iterator<Item = (f64, f64)> {
        let gap = |pair: &[f64]| (pair[1], 1e3 * (pair[1] - pair[0]));
        self.tokens[jobs].iter().flat_map(move |tokens| tokens.windows(2).map(gap))
    }
}

fn quantile(mut values: Vec<f64>, part: f64) -> f64 {
    values.sort_unstable_by(f64::total_cmp);
    values[((values.len() as f64 * part).ceil() as usize).max(1) - 1]
}

/// Milliseconds of the shortest step that has a chunk beside decodes of this length.
pub(crate) fn least_chunk_step_ms(num_decodes: usize, len: usize, prompt_len: usize) -> f64 {
    let prompt_s = prompt_len as f64 * KV_BYTES / BYTES_PER_S;
    decode_step_ms(num_decodes, len) + 1e3 * (prompt_s + CHUNK_S)
}

/// Milliseconds of a step of decodes of this length.
pub(crate) fn decode_step_ms(num_decodes: usize, len: usize) -> f64 {
    let kv_tokens = (num_decodes * len) as f64;
    1e3 * ((WEIGHTS_BYTES + kv_tokens * KV_BYTES) / BYTES_PER_S + 100e-6)
}

/// What computes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    H200,
    /// A few cores with a small model: time goes by tokens, whoever they are for.
    Cpu,
}

pub(crate) struct Device {
    kind: Kind,
    scheduler: Scheduler,
    noise: f64,
    draws: u64,
    /// When the device is done with all that was launched.
    now_s: f64,
}

impl Device {
    pub(crate) fn h200(policy: Policy, noise: f64) -> Self {
        Self::new(Kind::H200, policy, noise, (256, 8192))
    }

    pub(crate) fn cpu(policy: Policy, noise: f64) -> Self {
        Self::new(Kind::Cpu, policy, noise, (64, 256))
    }

    fn new(
        kind: Kind,
        policy: Policy,
        noise: f64,
        (max_num_seqs, max_num_batched_tokens): (usize, usize),
    ) -> Self {
        let mut scheduler = Scheduler::new(SchedulerConfig {
            other_windows: Vec::new(),
            max_num_seqs,
            max_num_batched_tokens,
            max_model_len: 40_000,
            block_size: 16,
            num_blocks: 50_000,
            memory: MemoryConfig {
                prefix_caching: false,
                preemption: Preemption::Recompute,
                num_swap_blocks: 0,
                keeps_cold_prefixes: false,
                max_moved_blocks: 0,
            },
        })
        .expect("the limits are sound");
        scheduler.set_policy(policy).expect("the policy is sound");
        Self { kind, scheduler, noise, draws: 1, now_s: 0.0 }
    }

    /// Runs until all jobs have ended.
    pub(crate) fn run(self, jobs: &[Job]) -> Report {
        self.run_for(jobs, f64::INFINITY)
    }

    /// Runs until all jobs have ended, or for so many seconds.
    pub(crate) fn run_for(mut self, jobs: &[Job], seconds: f64) -> Report {
        let mut report = Report {
            arrivals: jobs.iter().map(|job| job.at_s).collect(),
            tokens: vec![Vec::new(); jobs.len()],
            max_tokens: jobs.iter().map(|job| job.max_tokens).collect(),
            decisions: Vec::new(),
            end_s: 0.0,
            service: HashMap::new(),
        };
        let mut order: Vec<usize> = (0..jobs.len()).collect();
        order.sort_by(|&a, &b| jobs[a].at_s.total_cmp(&jobs[b].at_s));
        let mut coming: VecDeque<usize> = order.into();
        let mut in_flight = VecDeque::new();
        while self.now_s < seconds && !(coming.is_empty() && self.scheduler.is_idle()) {
            if self.scheduler.is_idle() && in_flight.is_empty() {
                self.now_s = self.now_s.max(jobs[coming[0]].at_s);
            }
            self.add_until_now(jobs, &mut coming);
            let planned = self.scheduler.plan();
            let keep = usize::from(planned.is_some());
            if let Some(batch) = planned {
                report.decisions.push(*self.scheduler.decision());
                self.scheduler.advance(&batch);
                in_flight.push_back(batch);
            }
            while in_flight.len() > keep {
                let batch = in_flight.pop_front().expect("length was just checked");
                self.collect(&batch, &mut report);
            }
        }
        report.end_s = self.now_s;
        let service = |(tenant, units): (&Tenant, u64)| (tenant.to_string(), units);
        report.service = self.scheduler.tenants().map(service).collect();
        report
    }

    fn add_until_now(&mut self, jobs: &[Job], coming: &mut VecDeque<usize>) {
        self.scheduler.set_now(Duration::from_secs_f64(self.now_s));
        while let Some(&i) = coming.front()
            && jobs[i].at_s <= self.now_s
        {
            coming.pop_front();
            let Job { prompt_len, max_tokens, tenant, .. } = jobs[i];
            let service = Service { tenant: Tenant::named(tenant), ..Service::default() };
            let spec = SequenceSpec::new(SequenceId(i as u64), vec![1; prompt_len]);
            let added = self.scheduler.add(SequenceSpec { max_tokens, service, ..spec });
            added.expect("it fits");
        }
    }

    fn collect(&mut self, batch: &Batch, report: &mut Report) {
        let took_s = self.step_s(batch);
        self.now_s += took_s;
        self.scheduler.collect(batch);
        for row in batch.sampled_rows() {
            self.scheduler.commit(row.id, 7);
            report.tokens[row.id.0 as usize].push(self.now_s);
        }
        self.scheduler.observe(batch, Duration::from_secs_f64(took_s));
    }

    /// The longer of memory and arithmetic, and what launching costs; one step in 500 is slow.
    fn step_s(&mut self, batch: &Batch) -> f64 {
        let mut kv_tokens = 0;
        let mut flop = 0.0;
        for row in &batch.rows {
            kv_tokens += row.context_len;
            let pairs = row.len as f64 * (row.start as f64 + row.len as f64 / 2.0);
            flop += row.len as f64 * FLOP_PER_TOKEN + pairs * FLOP_PER_PAIR;
        }
        let memory_s = (WEIGHTS_BYTES + kv_tokens as f64 * KV_BYTES) / BYTES_PER_S;
        let has_chunk = batch.rows.iter().any(|row| row.len > 1);
        let chunk_s = if has_chunk { CHUNK_S } else { 0.0 };
        let steady_s = match self.kind {
            Kind::H200 => memory_s.max(flop / FLOP_PER_S) + chunk_s + 100e-6,
            Kind::Cpu => 2e-3 + 0.4e-3 * batch.num_tokens as f64 + 1e-7 * kv_tokens as f64,
        };
        let noisy_s = steady_s * (1.0 + self.noise * self.uniform());
        if self.noise > 0.0 && self.uniform() < 0.002 { 1.5 * noisy_s } else { noisy_s }
    }

    fn uniform(&mut self) -> f64 {
        self.draws = self.draws.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (self.draws >> 40) as f64 / (1_u64 << 24) as f64
    }
}
