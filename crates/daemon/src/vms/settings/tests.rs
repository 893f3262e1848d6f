// SPDX-License-Identifier: Apache-2.0
use super::*;
use crate::testing::vm;

fn config(text: &str) -> Config {
    Config::parse(Path::new("v.toml"), text).unwrap()
}

fn settings() -> (tempfile::TempDir, Settings) {
    let dir = tempfile::tempdir().unwrap();
    let (s, warning) = Settings::read(dir.path());
    assert_eq!(warning, None);
    (dir, s)
}

fn change(class: Option<ClassSetting>, keep: bool) -> Change {
    Change {
        class,
        keep,
        ..Change::default()
    }
}

#[test]
fn viola_set_overrides_the_file_and_the_file_overrides_the_control_group() {
    let (_dir, mut s) = settings();
    let mut g = vm("g1", 7, &[&[1]]);
    let c = config("");
    assert_eq!(
        s.controls(&c, &g).weight,
        Setting {
            value: 256,
            source: Source::Default
        }
    );
    g.cgroup = Some(crate::testing::cgroup(Some(512), None));
    assert_eq!(
        s.controls(&c, &g).weight,
        Setting {
            value: 512,
            source: Source::Cgroup
        }
    );
    let c = config("[[vm]]\nname = \"g1\"\nweight = 7");
    assert_eq!(
        s.controls(&c, &g).weight,
        Setting {
            value: 7,
            source: Source::Config
        }
    );
    s.change(
        &g,
        &Change {
            weight: Some(9),
            ..Change::default()
        },
    )
    .unwrap();
    assert_eq!(
        s.controls(&c, &g).weight,
        Setting {
            value: 9,
            source: Source::Set
        }
    );
    s.change(
        &g,
        &Change {
            reset: true,
            ..Change::default()
        },
    )
    .unwrap();
    assert_eq!(s.controls(&c, &g).weight.source, Source::Config);
}

#[test]
fn the_lower_of_cap_and_quota_holds() {
    let (_dir, mut s) = settings();
    let c = config("");
    let mut g = vm("g1", 7, &[&[1], &[2]]);
    g.cgroup = Some(crate::testing::cgroup(None, Some(800)));
    let now = s.controls(&c, &g);
    assert_eq!(
        now.cap,
        Setting {
            value: Some(800),
            source: Source::Cgroup
        }
    );
    assert!(!now.capped_by_viola());
    let cap = |t: &str| Change {
        cap: Some(t.into()),
        ..Change::default()
    };
    s.change(&g, &cap("50%")).unwrap();
    assert_eq!(
        s.controls(&c, &g).cap,
        Setting {
            value: Some(500),
            source: Source::Set
        }
    );
    assert!(s.controls(&c, &g).capped_by_viola());
    s.change(&g, &cap("150%")).unwrap();
    assert_eq!(s.controls(&c, &g).cap.value, Some(800));
    g.cgroup = None;
    assert_eq!(s.controls(&c, &g).cap.value, Some(1500));
    s.change(&g, &cap("none")).unwrap();
    assert_eq!(
        s.controls(&c, &g).cap,
        Setting {
            value: None,
            source: Source::Set
        }
    );
}

#[test]
fn a_cap_over_the_cores_of_the_vm_is_refused_and_nothing_changes() {
    let (_dir, mut s) = settings();
    let g = vm("g1", 7, &[&[1]]);
    let change = Change {
        cap: Some("150%".into()),
        class: Some(ClassSetting::Ls),
        ..Change::default()
    };
    let said = s.change(&g, &change).unwrap_err();
    assert_eq!(said, "cap 150% is over the 1 core of g1; at most 100%");
    assert_eq!(s.controls(&config(""), &g).class.source, Source::Default);
}

#[test]
fn kept_settings_are_there_after_a_restart_and_others_are_not() {
    let (dir, mut s) = settings();
    let (a, b) = (vm("a", 7, &[&[1]]), vm("b", 8, &[&[1]]));
    s.change(
        &a,
        &Change {
            microslice: Some("100us".into()),
            ..Change::default()
        },
    )
    .unwrap();
    s.change(&a, &change(Some(ClassSetting::Ls), true)).unwrap();
    s.change(&b, &change(Some(ClassSetting::Ls), false))
        .unwrap();
    let (again, warning) = Settings::read(dir.path());
    assert_eq!(warning, None);
    let c = config("");
    let controls = again.controls(&c, &a);
    assert_eq!(
        controls.class,
        Setting {
            value: ClassSetting::Ls,
            source: Source::Kept
        }
    );
    assert_eq!(controls.microslice.value, 100_000);
    assert_eq!(again.controls(&c, &b).class.value, ClassSetting::Batch);
    let files: Vec<_> = fs::read_dir(dir.path())
        .unwrap()
        .map(|f| f.unwrap().file_name())
        .collect();
    assert_eq!(files, ["settings.json"]);
}

#[test]
fn a_damaged_file_is_renamed_with_a_warning() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(
        dir.path().join(FILE_NAME),
        "{\"vms\": {\"a\": {\"clas\": 1}}}",
    )
    .unwrap();
    let (_, warning) = Settings::read(dir.path());
    assert!(warning.unwrap().contains("settings.damaged"));
    assert!(dir.path().join("settings.damaged").exists());
}

#[test]
fn settings_of_a_vm_without_its_own_name_are_not_kept() {
    let (_dir, mut s) = settings();
    let g = crate::testing::vm_with_id("qemu:web@7", "web", 7, &[&[1]]);
    assert!(
        s.change(&g, &change(Some(ClassSetting::Ls), true))
            .unwrap_err()
            .contains("a name of its own")
    );
    assert!(s.change(&g, &change(Some(ClassSetting::Ls), false)).is_ok());
}

#[test]
fn an_empty_change_is_refused() {
    let (_dir, mut s) = settings();
    assert!(s.change(&vm("a", 7, &[&[1]]), &Change::default()).is_err());
}

#[test]
fn the_default_class_is_auto_when_viola_may_choose() {
    let (_dir, s) = settings();
    for (auto, class) in [
        ("auto = \"on\"", ClassSetting::Auto),
        ("[slices]\nauto = true", ClassSetting::Auto),
        ("auto = \"advise\"", ClassSetting::Batch),
        ("auto = \"off\"", ClassSetting::Batch),
        (
            "auto = { mode = \"on\", allow = [\"turbo\"] }",
            ClassSetting::Auto,
        ),
        (
            "auto = { mode = \"on\", allow = [\"lanes\", \"vpipe\"] }",
            ClassSetting::Batch,
        ),
        ("", ClassSetting::Batch),
    ] {
        let c = config(&format!("{auto}\n[[vm]]\nname = \"b\"\nclass = \"batch\""));
        let of = |name, pid| s.controls(&c, &vm(name, pid, &[&[1]])).class.value;
        assert_eq!(of("a", 7), class, "{auto}");
        assert_eq!(of("b", 8), ClassSetting::Batch, "{auto}");
    }
}

#[test]
fn a_temporary_class_ends_by_itself_and_what_held_before_holds_again() {
    let (_dir, mut s) = settings();
    let g = vm("g1", 7, &[&[1]]);
    let c = config("");
    let class = |s: &Settings| s.controls(&c, &g).class.value;
    s.change(&g, &change(Some(ClassSetting::Auto), false))
        .unwrap();
    let now = Instant::now();
    let ls = |for_s| Change {
        for_s: Some(for_s),
        ..change(Some(ClassSetting::Ls), false)
    };
    s.change_for(&g, &ls(20), 20, now).unwrap();
    assert_eq!(class(&s), ClassSetting::Ls);
    assert!(s.end_temporary(now + Duration::from_secs(19)).is_empty());
    assert_eq!(
        s.end_temporary(now + Duration::from_secs(20)),
        [g.id.to_string()]
    );
    assert_eq!(class(&s), ClassSetting::Auto);

    // So does 0, and an ordinary change.
    s.change_for(&g, &ls(20), 20, now).unwrap();
    s.change_for(&g, &ls(0), 0, now).unwrap();
    assert_eq!(class(&s), ClassSetting::Auto);
    s.change_for(&g, &ls(20), 20, now).unwrap();
    s.change(&g, &change(Some(ClassSetting::Batch), false))
        .unwrap();
    assert_eq!(class(&s), ClassSetting::Batch);

    let with_weight = Change {
        weight: Some(9),
        ..ls(20)
    };
    let without_class = Change {
        class: None,
        ..ls(20)
    };
    for (wrong, seconds, why) in [
        (with_weight, 20, "only a class"),
        (without_class, 20, "name a class"),
        (ls(3601), 3601, "too long"),
    ] {
        let said = s.change_for(&g, &wrong, seconds, now).unwrap_err();
        assert!(said.contains(why), "{said}");
    }
    assert_eq!(class(&s), ClassSetting::Batch);
}
