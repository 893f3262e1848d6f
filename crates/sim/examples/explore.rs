//! Rows.
use viola_sim::papers;
fn main() {
    let all = papers::run();
    let a: Vec<String> = std::env::args().collect();
    for r in &all.rows {
        let v = format!("{:?}", r.verdict());
        println!(
            "{:9} {} {:11} {}{} | {:?} | {:.3} | {}",
            v,
            r.paper,
            r.place,
            if r.held_out { "*" } else { " " },
            r.what,
            r.claim,
            r.ours,
            r.ratio().map_or(String::new(), |x| format!("{x:.2}"))
        );
    }
    println!(
        "{:?} {:?} {:?}",
        all.score(false),
        all.score(true),
        all.lab_score()
    );
    if a.len() > 1 {
        for p in &all.plots {
            println!("{} {:?}", p.title, p.axes);
            for (n, c) in &p.curves {
                println!("   {n}: {c:.2?}");
            }
        }
    }
}
