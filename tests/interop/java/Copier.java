import java.time.Duration;
import java.util.*;
import org.apache.kafka.clients.consumer.*;
import org.apache.kafka.clients.producer.*;
import org.apache.kafka.common.KafkaException;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.errors.*;

/**
 * Copies "in" to another topic in transactions with the offsets, until its standard input ends; every
 * fourth transaction is aborted.  Prints a line for each that has ended: "commit NUMBER SIZE" or "abort NUMBER".
 */
public class Copier {
    static KafkaProducer<String, String> producer;
    static KafkaConsumer<String, String> consumer;
    static volatile boolean done;

    static Map<String, Object> settings(String bootstrap, Object... pairs) {
        Map<String, Object> all = new HashMap<>();
        all.put("bootstrap.servers", bootstrap);
        all.put("reconnect.backoff.max.ms", 100);
        all.put("key.serializer", "org.apache.kafka.common.serialization.StringSerializer");
        all.put("value.serializer", "org.apache.kafka.common.serialization.StringSerializer");
        all.put("key.deserializer", "org.apache.kafka.common.serialization.StringDeserializer");
        all.put("value.deserializer", "org.apache.kafka.common.serialization.StringDeserializer");
        for (int i = 0; i < pairs.length; i += 2)
            all.put((String) pairs[i], pairs[i + 1]);
        return all;
    }

    /** Repeats a call that timed out: it has the same effect again, or its result. */
    static void insist(Runnable call) {
        while (true)
            try {
                call.run();
                return;
            } catch (TimeoutException again) {
                continue;
            }
    }

    static void rewind() {
        for (Map.Entry<TopicPartition, OffsetAndMetadata> each : consumer.committed(consumer.assignment()).entrySet())
            consumer.seek(each.getKey(), each.getValue() == null ? 0 : each.getValue().offset());
    }

    /** Returns whether the transaction was committed. */
    static boolean copy(ConsumerRecords<String, String> records, String target, int number) {
        try {
            producer.beginTransaction();
            Map<TopicPartition, OffsetAndMetadata> offsets = new HashMap<>();
            for (ConsumerRecord<String, String> each : records) {
                producer.send(new ProducerRecord<>(target, each.partition(), number + " " + records.count(), each.value()));
                offsets.put(new TopicPartition(each.topic(), each.partition()), new OffsetAndMetadata(each.offset() + 1));
            }
            producer.sendOffsetsToTransaction(offsets, consumer.groupMetadata());
            if (number % 4 != 0) {
                insist(producer::commitTransaction);
                return true;
            }
        } catch (ProducerFencedException | InvalidProducerEpochException fenced) {
            throw fenced;
        } catch (KafkaException refused) {
            System.err.println(number + ": " + refused);
        }
        insist(producer::abortTransaction);
        return false;
    }

    public static void main(String[] args) throws Exception {
        String target = args[1];
        producer = new KafkaProducer<>(settings(args[0], "transactional.id", target, "transaction.timeout.ms", 30000));
        consumer = new KafkaConsumer<>(settings(args[0], "group.id", target, "auto.offset.reset", "earliest",
            "enable.auto.commit", false, "isolation.level", "read_committed", "max.poll.records", 50,
            "session.timeout.ms", 10000, "heartbeat.interval.ms", 200, "fetch.max.wait.ms", 100));
        Thread watch = new Thread(() -> {
            try {
                while (System.in.read() >= 0)
                    continue;
            } catch (java.io.IOException closed) {
                // as the end
            }
            done = true;
        });
        watch.setDaemon(true);
        watch.start();
        producer.initTransactions();
        consumer.subscribe(Arrays.asList("in"));
        for (int number = 1; !done;) {
            ConsumerRecords<String, String> records = consumer.poll(Duration.ofMillis(200));
            if (records.isEmpty())
                continue;
            if (copy(records, target, number)) {
                System.out.println("commit " + number + " " + records.count());
            } else {
                System.out.println("abort " + number);
                insist(Copier::rewind);
            }
            number++;
        }
        consumer.close();
        producer.close();
    }
}
