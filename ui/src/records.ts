// Made by ui/records.py of kitae/ui/records.py: make ui.

export interface HeldOut {
  step: number;
  mean: number;
  low: number | null;
  high: number | null;
}

export interface RunSummary {
  key: string;
  name: string;
  folder: string;
  title: string;
  status: string;
  step: number;
  steps: number | null;
  metric: string;
  value: number | null;
  recent: (number | null)[];
  before: HeldOut | null;
  after: HeldOut | null;
  step_seconds: number | null;
  speed: number | null;
  eta: number | null;
  changed: number;
  size: number;
  problem: string;
  alike: string;
  tags: string[];
  note: string;
}

export interface Setting {
  key: string;
  value: unknown;
  changed: boolean;
}

export interface Event {
  time: number;
  kind: string;
  detail: string;
}

export interface RunDetail {
  summary: RunSummary;
  metrics: string[];
  evaluations: string[];
  phases: string[];
  settings: Setting[];
  events: Event[];
  rollouts: number;
}

export interface Series {
  steps: number[];
  columns: Record<string, (number | null)[]>;
  evaluation_steps: number[];
  evaluations: Record<string, (number | null)[]>;
}

export interface Brief {
  group: number;
  sample: number;
  step: number | null;
  fate: string;
  reason: string;
  value: number | null;
  outcome: string;
  finish: string;
  status: string;
  length: number;
  prompt_id: string;
  question: string;
  reference: string;
  text: string;
  detail: string;
}

export interface RolloutPage {
  rows: Brief[];
  at: number;
  next: string | null;
  total: number;
  searched: number;
}

export interface TurnView {
  role: string;
  text: string;
  calls: string[];
  name: string;
  pictures: string[];
}

export interface SampleView {
  sample: number;
  value: number | null;
  outcome: string;
  detail: string;
  components: Record<string, number>;
  finish: string;
  status: string;
  length: number;
  turns: number;
  versions: number[];
  rewards: number[];
  text: string;
  transcript: TurnView[];
}

export interface GroupView {
  group: number;
  prompt_id: string;
  messages: TurnView[];
  reference: string;
  context: string;
  step: number | null;
  fate: string;
  reason: string;
  version: number;
  samples: SampleView[];
  suspended: number;
  previous: number | null;
  next: number | null;
}

export interface ChainTokens {
  prompt: string[];
  tokens: number[];
  pieces: string[];
  by_model: boolean[];
  columns: Record<string, (number | null)[]>;
}

export interface SampleTokens {
  group: number;
  sample: number;
  readable: boolean;
  chains: ChainTokens[];
}

export interface Visit {
  group: number;
  step: number | null;
  rate: number;
}

export interface PromptHistory {
  prompt_id: string;
  question: string;
  kind: string;
  visits: Visit[];
}

export interface PromptPage {
  rows: PromptHistory[];
  at: number;
  total: number;
  counts: Record<string, number>;
}

export interface ErrorKind {
  detail: string;
  count: number;
  first_step: number | null;
  last_step: number | null;
  examples: Brief[];
}

export interface ErrorList {
  total: number;
  kinds: ErrorKind[];
}

export interface LaneSpan {
  part: string;
  step: number;
  lane: number;
  start: number;
  end: number;
}

export interface LaneView {
  first: number;
  last: number;
  of: number;
  start: number;
  end: number;
  lanes: Record<string, number>;
  busy: Record<string, number>;
  spans: LaneSpan[];
  left_out: number;
}

export interface SettingDifference {
  key: string;
  values: unknown[];
}

export interface Pairing {
  key: string;
  prompts: number;
  first: number;
  second: number;
  difference: number;
  low: number;
  high: number;
}

export interface HeldOutPairing {
  key: string;
  prompts: number;
  first: number | null;
  second: number | null;
  difference: number | null;
  low: number | null;
  high: number | null;
  p: number | null;
  reason: string;
}

export interface RunComparison {
  runs: RunSummary[];
  metrics: string[];
  settings: SettingDifference[];
  pairings: Pairing[];
  held_out: HeldOutPairing[];
}

export interface ConsoleEnd {
  text: string;
  complete: boolean;
}

export interface Diagnosed {
  rule: string;
  severity: string;
  title: string;
  evidence: string;
  advice: string;
}

export interface Diagnosis {
  findings: Diagnosed[];
  rules: number;
}

export interface ReportCard {
  title: string;
  question: string;
  reference: string;
  samples: SampleView[];
}

export interface AnswerPair {
  question: string;
  reference: string;
  first_at: string;
  first: string;
  first_value: number | null;
  last_at: string;
  last: string;
  last_value: number | null;
}

export interface RunReport {
  made: string;
  measure: string;
  first: number | null;
  last: number | null;
  machine: string[];
  seconds: number;
  paired: HeldOutPairing;
  moved: Record<string, number>;
  before_after: AnswerPair[];
  best: ReportCard[];
  worst: ReportCard[];
  groups: ReportCard[];
  phases: Record<string, number>;
  busy: Record<string, number>;
  every: number;
  evaluations: number;
}
