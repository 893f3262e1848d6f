// SPDX-License-Identifier: Apache-2.0
use super::*;
use proptest::prelude::*;

/// What a change does in a model: factors of the means, and the spread of single windows.
#[derive(Debug, Clone, Copy)]
struct Effect {
    own_delay: f64,
    neighbour_work: f64,
    neighbour_delay: f64,
    tolerated: f64,
    spread: f64,
}

const NONE: Effect = Effect {
    own_delay: 1.0,
    neighbour_work: 1.0,
    neighbour_delay: 1.0,
    tolerated: 0.0,
    spread: 1.5,
};

/// The VM that is tried, and its neighbour.
const OWN: u32 = 1;
const OTHER: u32 = 7;

/// Uniform numbers between 0 and 1, by splitmix64.
struct Chance(u64);

impl Chance {
    fn uniform(&mut self) -> f64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) >> 11) as f64 / (1u64 << 53) as f64
    }

    /// A factor between 1 / `spread` and `spread`.
    fn factor(&mut self, spread: f64) -> f64 {
        spread.powf(2.0 * self.uniform() - 1.0)
    }
}

/// Runs a trial to its end. Returns the outcome and the number of windows.
fn run(effect: Effect, seed: u64) -> (Outcome<u32>, usize) {
    let (mut trial, mut chance) = (Trial::new(seed), Chance(seed));
    for windows in 1.. {
        let factor = |f: f64| if trial.with() { f } else { 1.0 };
        let own = 5e6 * factor(effect.own_delay) * chance.factor(effect.spread);
        let work = 7e8 * factor(effect.neighbour_work) * chance.factor(1.01);
        let delay = 3e6 * factor(effect.neighbour_delay) * chance.factor(effect.spread);
        let sample = WindowSample {
            tried: vec![(
                OWN,
                Sample {
                    delay: Some(own),
                    work: 2e8,
                    tolerated: 0.0,
                },
            )],
            neighbours: vec![(
                OTHER,
                Sample {
                    delay: Some(delay),
                    work,
                    tolerated: effect.tolerated,
                },
            )],
        };
        if let Some(outcome) = trial.end_window(sample) {
            return (outcome, windows);
        }
    }
    unreachable!("a trial ends after the last look")
}

#[test]
fn a_neighbour_may_lose_a_part_of_what_an_earlier_change_gave_it() {
    let gains = Effect {
        own_delay: 0.3,
        neighbour_delay: 4.0,
        ..NONE
    };
    let kept = |tolerated| {
        let stays = |seed| run(Effect { tolerated, ..gains }, seed).0.stays(&OWN);
        (0..50).filter(|seed| stays(*seed)).count()
    };
    // Its delays are 3 ms, and 12 ms with the change.
    assert_eq!([kept(0.0), kept(4e6)], [0, 0]);
    assert!(kept(16e6) >= 49);
}

#[test]
fn the_delays_without_the_change_are_told() {
    let effect = Effect {
        own_delay: 0.1,
        tolerated: 1e9,
        neighbour_delay: 9.0,
        ..NONE
    };
    let outcome = run(effect, 1).0;
    let own = outcome.tried[&OWN].delay.unwrap();
    assert!((3.3e6..7.5e6).contains(&own), "{own}");
    let other = outcome.delays[&OTHER];
    assert!((2e6..4.5e6).contains(&other), "{other}");
}

#[test]
fn a_large_gain_stays_after_the_first_look() {
    let effect = Effect {
        own_delay: 0.2,
        ..NONE
    };
    let (outcome, windows) = run(effect, 3);
    assert!(outcome.stays(&OWN), "{outcome:?}");
    let own = &outcome.tried[&OWN];
    assert_eq!((own.pairs, windows), (LOOKS[0], 2 * LOOKS[0]));
    let own = own.ratio.unwrap();
    assert!((0.12..0.33).contains(&own.ratio), "{own:?}");
}

#[test]
fn a_gain_at_a_neighbours_cost_is_taken_back() {
    let work = Effect {
        own_delay: 0.2,
        neighbour_work: 0.95,
        ..NONE
    };
    let delay = Effect {
        own_delay: 0.2,
        neighbour_delay: 3.0,
        ..NONE
    };
    for (effect, good) in [(work, Good::Work), (delay, Good::Delay)] {
        let (outcome, _) = run(effect, 5);
        assert!(!outcome.stays(&OWN));
        let Harm { who, of, loss } = outcome.harm.unwrap();
        assert_eq!((who, of), (OTHER, good));
        assert!((loss.ratio < 0.98) == (good == Good::Work), "{loss:?}");
    }
}

#[test]
fn a_change_without_effect_ends_when_a_cut_to_half_can_be_excluded() {
    let (outcome, windows) = run(NONE, 11);
    let own = &outcome.tried[&OWN];
    assert_eq!((own.finding, windows), (Finding::NoGain, 2 * LOOKS[1]));
    assert!(own.ratio.unwrap().interval.0 > MIN_GAIN);
    // Where windows differ much, this takes all pairs.
    let noisy = Effect {
        spread: 20.0,
        ..NONE
    };
    let (outcome, windows) = run(noisy, 11);
    let finding = outcome.tried[&OWN].finding;
    assert_eq!((finding, windows), (Finding::NoGain, 2 * LOOKS[3]));
}

#[test]
fn a_vm_to_which_nothing_comes_ends_the_trial() {
    let mut trial = Trial::new(1);
    let empty = WindowSample::<u32> {
        tried: vec![(OWN, Sample::default())],
        neighbours: Vec::new(),
    };
    let ended = (1..).find_map(|n| Some((n, trial.end_window(empty.clone())?)));
    let (windows, outcome) = ended.unwrap();
    let own = &outcome.tried[&OWN];
    assert_eq!(
        (windows, own.finding, own.ratio),
        (2 * MAX_EMPTY_PAIRS, Finding::TooFewEvents, None)
    );
}

#[test]
fn each_pair_has_one_window_of_each_side_in_an_order_by_lot() {
    let mut trial = Trial::<u32>::new(42);
    let mut orders = Vec::new();
    for _ in 0..9 {
        let first = trial.with();
        for side in [first, !first] {
            assert_eq!(trial.with(), side);
            let own = Sample {
                delay: Some(1e6),
                work: 1e8,
                tolerated: 0.0,
            };
            let (tried, neighbours) = (vec![(OWN, own)], Vec::new());
            assert_eq!(trial.end_window(WindowSample { tried, neighbours }), None);
        }
        orders.push(first);
    }
    assert!(
        orders.contains(&true) && orders.contains(&false),
        "{orders:?}"
    );
}

/// A trial of two VMs, whose delays the change multiplies by these factors.
fn run_two(factors: [f64; 2], seed: u64) -> (Outcome<u32>, usize) {
    let (mut trial, mut chance) = (Trial::new(seed), Chance(seed));
    for windows in 1.. {
        let sample = |(who, factor): (u32, f64)| {
            let factor = if trial.with() { factor } else { 1.0 };
            let delay = 5e6 * factor * chance.factor(1.5);
            let got = Sample {
                delay: Some(delay),
                work: 2e8,
                tolerated: 0.0,
            };
            (who, got)
        };
        let sample = WindowSample {
            tried: [OWN, OTHER].into_iter().zip(factors).map(sample).collect(),
            neighbours: Vec::new(),
        };
        if let Some(outcome) = trial.end_window(sample) {
            return (outcome, windows);
        }
    }
    unreachable!("a trial ends after the last look")
}

#[test]
fn of_two_that_are_tried_together_each_keeps_the_change_that_gains() {
    let (both, windows) = run_two([0.2, 0.3], 1);
    assert_eq!(
        (both.stays(&OWN), both.stays(&OTHER), windows),
        (true, true, 2 * LOOKS[0])
    );
    let (one, windows) = run_two([0.2, 1.0], 1);
    assert_eq!(
        (one.stays(&OWN), one.stays(&OTHER), windows),
        (true, false, 2 * LOOKS[0])
    );
    assert_eq!(one.tried[&OTHER].finding, Finding::NoGain);
}

#[test]
fn of_two_that_are_tried_together_none_may_lose() {
    let (outcome, _) = run_two([0.2, 3.0], 1);
    let harm = outcome.harm.as_ref().unwrap();
    assert_eq!((harm.who, harm.of), (OTHER, Good::Delay));
    assert!(!outcome.stays(&OWN) && !outcome.stays(&OTHER));
    // A VM alone cannot lose by others.
    let alone = Effect {
        own_delay: 3.0,
        ..NONE
    };
    let outcome = run(alone, 1).0;
    assert_eq!(outcome.tried[&OWN].finding, Finding::NoGain);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(16))]

    /// At most 1 of 100 changes without effect is kept, and at most 1 of 200 is taken for a harm to a neighbour. 300 trials with
    /// more than 9 of either would be seen once in 600 batches at the bound; the test's looks use less than the bound allows.
    #[test]
    fn chance_is_rarely_taken_for_an_effect(seed in any::<u64>(), spread in 1.05f64..4.0) {
        let effect = Effect { spread, ..NONE };
        let (mut kept, mut harms) = (0, 0);
        for i in 0..300 {
            let outcome = run(effect, seed.wrapping_add(i * 0x1234_5677)).0;
            kept += usize::from(outcome.stays(&OWN));
            harms += usize::from(outcome.harm.is_some());
        }
        prop_assert!(kept <= 9 && harms <= 9, "{kept} kept, {harms} harms");
    }

    /// At most 5 of 100 cuts to half are missed although single windows differ by a factor of two. 1.1 of 100 are (20,000 trials):
    /// 300 trials with more than 15 misses would be seen once in a million batches.
    #[test]
    fn a_cut_to_half_is_found(seed in any::<u64>()) {
        let effect = Effect { own_delay: 0.5, spread: 2.0, ..NONE };
        let missed = (0..300).filter(|i| !run(effect, seed.wrapping_add(i * 0x777)).0.stays(&OWN)).count();
        prop_assert!(missed <= 15, "{missed} missed");
    }
}
