// SPDX-License-Identifier: Apache-2.0
package org.viola.hdfs;

import java.io.IOException;
import java.nio.ByteBuffer;
import org.apache.hadoop.hdfs.ReplicaAccessor;
import org.apache.hadoop.security.token.SecretManager.InvalidToken;
import org.viola.hdfs.Replica.Piece;

/**
 * Reads one block for one client. Sequential reads use growing windows, and the next window is fetched while
 * the client uses the current one. A single read fetches only what the client requests.
 */
final class BlockReader extends ReplicaAccessor {
  private final Vread vread;
  private final Replica replica;
  private final long length;
  private final boolean verify;

  private Piece current;
  private MountThreads.Job<Piece> ahead;
  private long aheadStart;
  private long aheadEnd;
  /** End of the last read; -1 before the first. */
  private long last = -1;
  private int window = Settings.MIN_WINDOW_BYTES;
  private boolean sequential;
  private boolean closed;

  BlockReader(Vread vread, Replica replica, long length, boolean verify) {
    this.vread = vread;
    this.replica = replica;
    this.length = length;
    this.verify = verify;
  }

  @Override
  public int read(long position, byte[] bytes, int offset, int count) throws IOException {
    return read(position, ByteBuffer.wrap(bytes, offset, count));
  }

  @Override
  public int read(long position, ByteBuffer to) throws IOException {
    if (closed) {
      throw new IOException("the block reader is closed");
    }
    if (!to.hasRemaining()) {
      return 0;
    }
    if (position < 0 || position >= length) {
      return -1;
    }
    int wanted = (int) Math.min(to.remaining(), length - position);
    updateSequential(position, wanted);
    int done = 0;
    try {
      while (done < wanted) {
        done += copy(position + done, wanted - done, to);
      }
    } catch (FallbackException e) {
      vread.refuse(replica.key, e);
      if (done == 0) {
        // The only error after which the client continues at the same DataNode at once and without a warning.
        throw new InvalidToken("viola: " + replica.key + ": " + e.getMessage());
      }
    }
    last = position + done;
    Counters.get().bytes.incr(done);
    return done;
  }

  /** Decides whether the reads are sequential. */
  private void updateSequential(long position, int wanted) {
    sequential = position == last || (position == 0 && wanted >= Settings.MIN_WINDOW_BYTES);
    if (!sequential) {
      window = Settings.MIN_WINDOW_BYTES;
    }
    while (window < wanted && window < vread.settings.window) {
      window *= 2;
    }
  }

  private int copy(long position, int wanted, ByteBuffer to) throws IOException {
    if (current == null || !current.has(position)) {
      fetch(position, wanted);
    }
    ByteBuffer from = current.buffer.duplicate();
    int at = (int) (position - current.start);
    from.position(at).limit(Math.min(from.limit(), at + wanted));
    int count = from.remaining();
    to.put(from);
    return count;
  }

  /** Makes the current piece one that contains this position. */
  private void fetch(long position, int wanted) throws IOException {
    drop();
    MountThreads.Job<Piece> job;
    if (ahead != null && position >= aheadStart && position < aheadEnd) {
      job = ahead;
      ahead = null;
    } else {
      abandon();
      long max = sequential ? window : Math.min(wanted, vread.settings.window);
      aheadEnd = Math.min(length, position + Math.max(max, Math.min(wanted, vread.settings.window)));
      job = begin(position, aheadEnd);
    }
    long end = aheadEnd;
    if (sequential && end < length) {
      window = Math.min(2 * window, vread.settings.window);
      try {
        aheadStart = end;
        aheadEnd = Math.min(length, end + window);
        ahead = begin(aheadStart, aheadEnd);
      } catch (FallbackException busy) {
        // The bytes are fetched when they are read.
        aheadEnd = end;
      }
    }
    current = job.await();
  }

  private MountThreads.Job<Piece> begin(long from, long to) throws IOException {
    if (!vread.threads.mayTryMount()) {
      throw new FallbackException(FallbackReason.DEADLINE, vread.threads.stuck() + " threads hang in the mount");
    }
    if (!replica.use()) {
      throw new FallbackException(FallbackReason.ERROR, "its files are closed");
    }
    boolean single = !sequential;
    return vread.threads.begin(
        () -> replica.read(from, to, verify, single),
        piece -> vread.buffers.give(piece.buffer),
        () -> vread.release(replica));
  }

  private void drop() {
    if (current != null) {
      vread.buffers.give(current.buffer);
      current = null;
    }
  }

  private void abandon() {
    if (ahead != null) {
      ahead.abandon();
      ahead = null;
    }
  }

  @Override
  public void close() {
    if (!closed) {
      closed = true;
      drop();
      abandon();
      vread.release(replica);
    }
  }

  @Override
  public boolean isLocal() {
    return true;
  }

  @Override
  public boolean isShortCircuit() {
    return true;
  }

  @Override
  public int getNetworkDistance() {
    return 0;
  }
}
