// SPDX-License-Identifier: Apache-2.0
//! Rules for every file of this project.
#![allow(clippy::unwrap_used)]

use std::fs;
use std::path::{Path, PathBuf};

/// Maximum of lines of a Rust file.
const MAX_LINES: usize = 500;
/// Generated or downloaded files, and files without a place for a licence.
const EXEMPT: [&str; 10] = [
    ".git",
    "target",
    "build",
    "corpus",
    "artifacts",
    "LICENSES",
    "results",
    "img",
    "Cargo.lock",
    "issues",
];

fn files() -> Vec<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let mut folders = vec![root.canonicalize().unwrap()];
    let mut all = Vec::new();
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).unwrap() {
            let entry = entry.unwrap();
            if EXEMPT.iter().any(|name| entry.file_name() == *name) {
                continue;
            }
            match entry.file_type().unwrap() {
                t if t.is_dir() => folders.push(entry.path()),
                t if t.is_file() => all.push(entry.path()),
                _ => {}
            }
        }
    }
    assert!(all.len() > 300, "only {} files found", all.len());
    all
}

#[test]
fn every_file_names_its_licence() {
    let mark = concat!("SPDX-", "License-Identifier: ");
    let bare: Vec<PathBuf> = files()
        .into_iter()
        .filter(|file| {
            let text = fs::read(file).unwrap();
            let head = String::from_utf8_lossy(&text[..text.len().min(600)]).into_owned();
            !head.contains(mark)
        })
        // git's own file of a second work tree.
        .filter(|file| file.file_name().unwrap() != ".git")
        .collect();
    assert!(bare.is_empty(), "files without a licence line: {bare:#?}");
}

#[test]
fn every_page_of_the_book_is_in_its_summary() {
    let book = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/src");
    let book = book.canonicalize().unwrap();
    let summary = fs::read_to_string(book.join("SUMMARY.md")).unwrap();
    let pages: Vec<PathBuf> = (files().iter())
        .filter(|file| file.extension().is_some_and(|extension| extension == "md"))
        .filter_map(|file| Some(file.strip_prefix(&book).ok()?.to_owned()))
        .filter(|page| page != Path::new("SUMMARY.md"))
        .collect();
    assert!(pages.len() > 50, "only {} pages found", pages.len());
    let is_left_out = |page: &&PathBuf| !summary.contains(&format!("({})", page.display()));
    let left_out: Vec<&PathBuf> = pages.iter().filter(is_left_out).collect();
    assert!(
        left_out.is_empty(),
        "pages that are not in SUMMARY.md: {left_out:#?}"
    );
}

#[test]
fn no_file_exceeds_the_maximum_length() {
    let is_rust = |file: &PathBuf| file.extension().is_some_and(|e| e == "rs");
    let long: Vec<(PathBuf, usize)> = files()
        .into_iter()
        .filter(is_rust)
        .map(|file| {
            let lines = fs::read_to_string(&file).unwrap().lines().count();
            (file, lines)
        })
        .filter(|(_, lines)| *lines > MAX_LINES)
        .collect();
    assert!(long.is_empty(), "longer than {MAX_LINES} lines: {long:#?}");
}

/// This project's crates that a package depends on, without test dependencies.
fn dependencies(package: &str) -> Vec<String> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let output = std::process::Command::new(cargo)
        .args(["tree", "--package", package, "--edges", "normal,build"])
        .args(["--prefix", "none", "--format", "{p}"])
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .output()
        .unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success(), "{text}");
    text.lines()
        .filter_map(|line| line.split(' ').next())
        .filter(|name| name.starts_with("viola"))
        .map(str::to_owned)
        .collect()
}

#[test]
fn the_product_links_nothing_of_the_lab() {
    let product = dependencies("viola");
    assert!(product.contains(&"viola-daemon".to_owned()), "{product:?}");
    for lab in ["viola-lab", "viola-bench"] {
        assert!(!product.contains(&lab.to_owned()), "{product:?}");
    }
    assert!(dependencies("viola-bench").contains(&"viola-lab".to_owned()));
}
