// SPDX-License-Identifier: Apache-2.0
use proptest::prelude::*;

use super::*;

fn extent(logical: u64, physical: u64, length: u64) -> Extent {
    Extent {
        logical,
        physical,
        length,
        zero: false,
    }
}

fn zero(logical: u64, length: u64) -> Extent {
    Extent {
        zero: true,
        ..extent(logical, 0, length)
    }
}

#[test]
fn a_file_is_extents_holes_and_zeros_in_order() {
    let map = CheckedMap::new(
        &[extent(10, 100, 10), zero(20, 5), extent(30, 50, 10)],
        50,
        110,
    )
    .unwrap();
    let pieces = |offset, len| map.pieces(offset, len).collect::<Vec<_>>();
    let at = |offset, len| Piece::At { offset, len };
    let none = |len| Piece::Zero { len };
    assert_eq!(
        pieces(0, u64::MAX),
        [
            none(10),
            at(100, 10),
            none(5),
            none(5),
            at(50, 10),
            none(10)
        ]
    );
    assert_eq!(pieces(15, 2), [at(105, 2)]);
    assert_eq!(pieces(19, 2), [at(109, 1), none(1)]);
    assert_eq!(pieces(39, 100), [at(59, 1), none(10)]);
    assert_eq!(pieces(50, 1), []);
    assert_eq!(pieces(u64::MAX, u64::MAX), []);
    assert_eq!(pieces(10, 0), []);
    assert_eq!((map.len(), map.disk_end()), (50, 110));
}

#[test]
fn neighbours_are_merged() {
    let map = CheckedMap::new(
        &[extent(0, 8, 4), extent(4, 12, 4), extent(8, 17, 4)],
        12,
        21,
    )
    .unwrap();
    assert_eq!(map.extents(), [extent(0, 8, 8), extent(8, 17, 4)]);
}

#[test]
fn hostile_numbers_are_refused() {
    const BIG: u64 = 1 << 63;
    let refused = |extents: &[Extent]| CheckedMap::new(extents, 1 << 20, 1 << 30).unwrap_err();
    assert_eq!(refused(&[extent(0, 0, 0)]), BadExtents::Empty(0));
    assert_eq!(refused(&[extent(BIG, 0, BIG)]), BadExtents::Overflow(0));
    assert_eq!(refused(&[extent(0, 0, BIG)]), BadExtents::OutsideFile(0));
    assert_eq!(refused(&[extent(BIG, 0, 1)]), BadExtents::OutsideFile(0));
    assert_eq!(refused(&[extent(0, BIG, 1)]), BadExtents::OutsideDisk(0));
    assert_eq!(refused(&[extent(0, u64::MAX, 1)]), BadExtents::Overflow(0));
    assert_eq!(
        refused(&[extent(0, (1 << 30) - 1, 2)]),
        BadExtents::OutsideDisk(0)
    );
    assert_eq!(
        refused(&[Extent {
            physical: 1 << 30,
            ..zero(0, 1)
        }]),
        BadExtents::OutsideDisk(0)
    );
    assert_eq!(
        refused(&[extent(0, 0, 10), extent(9, 100, 10)]),
        BadExtents::Overlap(1)
    );
    assert_eq!(
        refused(&[extent(50, 0, 10), extent(0, 100, 10)]),
        BadExtents::Overlap(1)
    );
    assert_eq!(
        CheckedMap::new(&[], BIG, 0).unwrap_err(),
        BadExtents::FileTooLong(BIG)
    );
}

#[test]
fn ten_million_extents_are_refused_by_their_number() {
    let many = vec![extent(u64::MAX, u64::MAX, u64::MAX); 10_000_000];
    assert_eq!(
        CheckedMap::new(&many, 1, 1).unwrap_err(),
        BadExtents::TooMany(10_000_000)
    );
    let most: Vec<_> = (0..MAX_EXTENTS as u64)
        .map(|i| extent(2 * i, 2 * i, 1))
        .collect();
    let map = CheckedMap::new(&most, 1 << 20, 1 << 20).unwrap();
    assert_eq!(map.extents().len(), MAX_EXTENTS);
    assert_eq!(map.pieces(0, 1 << 20).count(), 2 * MAX_EXTENTS);
}

#[test]
fn the_longest_file_without_extents_is_one_hole() {
    let map = CheckedMap::new(&[], MAX_FILE_BYTES, 0).unwrap();
    let pieces: Vec<_> = map.pieces(0, u64::MAX).collect();
    assert_eq!(
        pieces,
        [Piece::Zero {
            len: MAX_FILE_BYTES
        }]
    );
}

/// Small numbers, numbers near the powers of two at which things break, and any at all.
fn number() -> impl Strategy<Value = u64> {
    let edge = (0u32..64, -2i64..3).prop_map(|(bit, off)| (1u64 << bit).wrapping_add_signed(off));
    prop_oneof![4 => 0u64..64, 1 => edge, 1 => any::<u64>()]
}

fn any_extent() -> impl Strategy<Value = Extent> {
    (number(), number(), number(), any::<bool>()).prop_map(|(logical, physical, length, zero)| {
        Extent {
            logical,
            physical,
            length,
            zero,
        }
    })
}

/// Extents that are mostly good: gaps and lengths in order, somewhere on a disk of 200 bytes.
fn ordered_extents() -> impl Strategy<Value = Vec<Extent>> {
    prop::collection::vec((0u64..6, 1u64..9, 0u64..195, any::<bool>()), 0..12).prop_map(|list| {
        let mut at = 0;
        let mut out = Vec::new();
        for (gap, length, physical, zero) in list {
            at += gap;
            out.push(Extent {
                logical: at,
                physical,
                length,
                zero,
            });
            at += length;
        }
        out
    })
}

/// The same checks as in `CheckedMap::new`, in 128-bit numbers that cannot overflow.
fn is_valid(extents: &[Extent], len: u64, disk: u64) -> bool {
    let end = |start: u64, length: u64| u128::from(start) + u128::from(length);
    len <= MAX_FILE_BYTES
        && extents.len() <= MAX_EXTENTS
        && extents.iter().all(|e| {
            e.length > 0
                && end(e.logical, e.length) <= u128::from(len)
                && end(e.physical, e.length) <= u128::from(disk)
        })
        && extents
            .windows(2)
            .all(|w| end(w[0].logical, w[0].length) <= u128::from(w[1].logical))
}

/// Where a byte of the file is on the disk, by looking through all extents.
fn naive(extents: &[Extent], at: u64) -> Option<u64> {
    let e = extents
        .iter()
        .find(|e| e.logical <= at && at - e.logical < e.length)?;
    (!e.zero).then(|| e.physical + (at - e.logical))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn exactly_the_good_ones_are_taken(
        extents in prop_oneof![prop::collection::vec(any_extent(), 0..5), ordered_extents()],
        len in number(), disk in number(),
    ) {
        prop_assert_eq!(CheckedMap::new(&extents, len, disk).is_ok(), is_valid(&extents, len, disk));
    }

    #[test]
    fn every_byte_is_where_a_naive_search_finds_it(
        extents in ordered_extents(), tail in 0u64..10, offset in 0u64..120, wanted in 0u64..120,
    ) {
        let end = extents.last().map_or(0, |e| e.logical + e.length);
        let len = end + tail;
        let disk = 210;
        let map = CheckedMap::new(&extents, len, disk).unwrap();
        let mut at = offset;
        for piece in map.pieces(offset, wanted) {
            prop_assert!(!piece.is_empty());
            for i in 0..piece.len() {
                let place = match piece {
                    Piece::Zero { .. } => None,
                    Piece::At { offset, .. } => Some(offset + i),
                };
                prop_assert_eq!(place, naive(&extents, at + i));
                prop_assert!(place.is_none_or(|p| p < map.disk_end()));
            }
            at += piece.len();
        }
        prop_assert_eq!(at - offset, len.min(offset + wanted).saturating_sub(offset));
        prop_assert!(map.disk_end() <= disk);
        prop_assert!(map.extents().len() <= extents.len());
    }

    #[test]
    fn whatever_was_taken_stays_within_the_disk(
        extents in prop::collection::vec(any_extent(), 0..4), len in number(), disk in number(),
        offset in number(), wanted in number(),
    ) {
        if let Ok(map) = CheckedMap::new(&extents, len, disk) {
            let mut sum = 0u64;
            for piece in map.pieces(offset, wanted) {
                if let Piece::At { offset, len } = piece {
                    prop_assert!(offset.checked_add(len).is_some_and(|end| end <= disk));
                }
                sum += piece.len();
            }
            prop_assert_eq!(sum, len.saturating_sub(offset).min(wanted));
        }
    }
}
