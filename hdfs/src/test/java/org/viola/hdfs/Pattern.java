// SPDX-License-Identifier: Apache-2.0
package org.viola.hdfs;

/**
 * The content of a file, given by its name: {@code NAME_SEED[_FROM_SEED]...}. Each seed generates its own
 * sequence of bytes from its position on; sequences do not repeat in practice.
 */
final class Pattern {
  private final long[] starts;
  private final long[] seeds;

  private Pattern(long[] starts, long[] seeds) {
    this.starts = starts;
    this.seeds = seeds;
  }

  /** The content of the file with this name. */
  static Pattern of(String name) {
    String[] words = name.split("_");
    int count = words.length / 2;
    if (words.length % 2 != 0 || count == 0) {
      throw new IllegalArgumentException("the name " + name + " does not say what is in the file");
    }
    long[] starts = new long[count];
    long[] seeds = new long[count];
    for (int i = 0; i < count; i++) {
      starts[i] = i == 0 ? 0 : Long.parseLong(words[2 * i]);
      seeds[i] = Long.parseLong(words[2 * i + 1]);
    }
    return new Pattern(starts, seeds);
  }

  /** Writes the bytes from {@code position} on. */
  void fill(long position, byte[] to, int count) {
    for (int i = 0; i < count;) {
      long at = position + i;
      if ((at & 7) == 0 && count - i >= 8 && seed(at) == seed(at + 7)) {
        long word = mix(seed(at), at >>> 3);
        for (int b = 0; b < 8; b++) {
          to[i++] = (byte) (word >>> 8 * b);
        }
      } else {
        to[i++] = at(at);
      }
    }
  }

  /** Index of the first byte that differs; -1 if none does. */
  int differs(long position, byte[] bytes, int count) {
    int i = 0;
    while (i < count) {
      long at = position + i;
      if ((at & 7) == 0 && count - i >= 8 && seed(at) == seed(at + 7)) {
        long word = mix(seed(at), at >>> 3);
        int same = 0;
        while (same < 8 && bytes[i + same] == (byte) (word >>> 8 * same)) {
          same++;
        }
        if (same < 8) {
          return i + same;
        }
        i += 8;
      } else if (bytes[i] != at(at)) {
        return i;
      } else {
        i++;
      }
    }
    return -1;
  }

  private byte at(long position) {
    return (byte) (mix(seed(position), position >>> 3) >>> 8 * (position & 7));
  }

  private long seed(long position) {
    int i = starts.length - 1;
    while (starts[i] > position) {
      i--;
    }
    return seeds[i];
  }

  /** The finaliser of splitmix64. */
  private static long mix(long seed, long index) {
    long z = seed * 0x9E3779B97F4A7C15L + index * 0xD1B54A32D192ED03L + 0x632BE59BD9B4E019L;
    z = (z ^ z >>> 30) * 0xBF58476D1CE4E5B9L;
    z = (z ^ z >>> 27) * 0x94D049BB133111EBL;
    return z ^ z >>> 31;
  }
}
