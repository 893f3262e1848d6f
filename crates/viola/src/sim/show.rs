// SPDX-License-Identifier: Apache-2.0
//! Tables of `viola sim`.

use viola_sim::advise::{Advice, Spread};
use viola_sim::fleet;
use viola_sim::scenario::Outcome;

use viola_cli::table::align;

/// A number in three significant digits.
pub fn number(x: f64) -> String {
    match x.abs() {
        _ if x.is_nan() => "-".into(),
        0.0 => "0".into(),
        a if a >= 100.0 => format!("{x:.0}"),
        a if a >= 10.0 => format!("{x:.1}"),
        a if a >= 0.1 => format!("{x:.2}"),
        _ => format!("{x:.4}"),
    }
}

/// A run of a scenario.
pub fn outcome(of: &Outcome) -> String {
    let head = ["NAME", "RAN %", "WAITED %", "LONGEST MS", "RING DROPS"];
    let mut rows = vec![head.map(String::from).to_vec()];
    let mut figures = vec![["VM", "WORK", "FIGURE", "VALUE"].map(String::from).to_vec()];
    for vm in &of.vms {
        rows.push(vec![
            vm.name.clone(),
            number(100.0 * vm.ran),
            number(100.0 * vm.waited),
            number(vm.longest_wait_ms),
            vm.ring_drops.to_string(),
        ]);
        for (kind, name, value) in &vm.figures {
            figures.push(vec![
                vm.name.clone(),
                kind.clone(),
                name.clone(),
                number(*value),
            ]);
        }
    }
    let mut text = format!(
        "{}: {} s simulated, {} events\n\n",
        of.name,
        number(of.seconds),
        of.events
    );
    text.push_str(&align(&rows));
    if figures.len() > 1 {
        text.push('\n');
        text.push_str(&align(&figures));
    }
    text
}

fn spread(of: &Spread) -> String {
    let (low, high) = of.range;
    format!(
        "{} ({} .. {})",
        number(of.median),
        number(low),
        number(high)
    )
}

/// Advice on a host.
pub fn advice(all: &[Advice], seeds: u64) -> String {
    let mut text = format!("Medians of {seeds} seeds, in brackets the lowest and the highest.\n");
    for vm in all {
        let mut does = Vec::new();
        match vm.microslice_us {
            Some(us) => does.push(format!("class ls with microslices of {us} us")),
            None => does.push("class batch".to_owned()),
        }
        if vm.turbo {
            does.push("a turbo vCPU".into());
        }
        if vm.vread {
            does.push("vread".into());
        }
        if vm.vpipe {
            does.push("vpipe".into());
        }
        let (what, why) = (does.join(", "), &vm.why);
        text.push_str(&format!(
            "\n{}: {what} ({why}); for lanes it is \"{}\"\n",
            vm.vm, vm.lane
        ));
        let turbo = vm.figures.iter().any(|f| f.turbo.is_some());
        let mut head = vec!["  FIGURE".to_owned(), "NOW".into(), "SLICES".into()];
        head.extend(turbo.then(|| "TURBO".to_owned()));
        let paths = vm.figures.iter().any(|f| f.paths.is_some());
        head.extend(paths.then(|| "VREAD, VPIPE".to_owned()));
        let mut rows = vec![head];
        for f in &vm.figures {
            let mut row = vec![format!("  {}", f.name), spread(&f.now), spread(&f.slices)];
            row.extend(f.turbo.as_ref().map(spread));
            row.extend(f.paths.as_ref().map(spread));
            rows.push(row);
        }
        text.push_str(&align(&rows));
    }
    text
}

/// A run of the fleet.
pub fn fleet(figures: &[(&str, f64)], error: &fleet::ModelError) -> String {
    let mut rows: Vec<Vec<String>> = figures
        .iter()
        .map(|(name, value)| vec![(*name).to_owned(), number(*value)])
        .collect();
    rows.push(vec![
        "against the event model".into(),
        format!("{} cores for 60 s", error.cores),
    ]);
    rows.push(vec![
        "  share of a VM off by, % of a core".into(),
        number(100.0 * error.share_error),
    ]);
    rows.push(vec![
        "  mean wait by the event model, ms".into(),
        number(error.event_wait_ms),
    ]);
    rows.push(vec![
        "  mean wait by the fluid model, ms".into(),
        number(error.fluid_wait_ms),
    ]);
    align(&rows)
}
